"""The REST routes: sessions, rewards, and the operators' side."""
