"""One answer: begun, sampled, recorded."""
