"""From a job to an answer: sequences run, and their text is written as it comes."""
