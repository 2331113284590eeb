"""One SGLang engine: its command, its process, its HTTP interface."""
