"""What belongs to one site and outlives a job: policy, memory, set-up, identity."""
