"""Opens a session, makes one call with an OpenAI client, and ends the session with a reward."""

from pathlib import Path

import httpx
from openai import OpenAI

key = Path("run/keys/client_keys").read_text().split()[0]  # `make up` made it
gateway = httpx.Client(base_url="http://127.0.0.1:8000", headers={"x-api-key": key})
session = gateway.post("/sessions", json={"task_id": "greeting"}).raise_for_status().json()

client = OpenAI(base_url=session["base_url"], api_key=session["api_key"])
reply = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "value of c?"}])

answer = reply.choices[0].message.content or ""
end = {"status": "completed", "reward": float(answer == "7")}
print(answer, gateway.post(f"/sessions/{session['session_id']}/finish", json=end).json()["verdict"])
