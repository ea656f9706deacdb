"""What passes between the processes of a replica: step plans, messages, reports. No torch."""
