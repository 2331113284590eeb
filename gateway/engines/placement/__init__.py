"""The arithmetic of placement: which server a call goes to, and how many calls a server may have."""
