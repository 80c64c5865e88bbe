"""Launch plans: what a call allocates and launches."""
