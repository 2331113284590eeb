"""The servers in rotation, the choice of one for a call, and the calls that wait for one."""
