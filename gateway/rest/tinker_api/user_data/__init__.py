"""What a user's client sessions leave, as data of the user: deletion, export, and removal after a time."""
