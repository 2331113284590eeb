"""OpenEnv: environments that a server plays over WebSocket, one connection for each episode."""
