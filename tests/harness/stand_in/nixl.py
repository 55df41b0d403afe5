"""What prefill and decode servers are checked for; the stand-ins send no cache."""
