"""Messages between the processes of a replica: step plans, requests, outputs, reports. No torch."""
