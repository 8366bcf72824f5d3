"""Many runs: search, schedule, record, pick."""
