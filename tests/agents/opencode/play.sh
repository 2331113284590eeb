# The commands of a user who runs opencode without its screen. Base URL and key come from the environment.
set -eu

cat > opencode.json <<END
{
  "\$schema": "https://opencode.ai/config.json",
  "model": "weir/policy",
  "provider": {
    "weir": {
      "npm": "@ai-sdk/openai-compatible",
      "options": { "baseURL": "$OPENAI_BASE_URL", "apiKey": "$OPENAI_API_KEY" },
      "models": { "policy": { "limit": { "context": 200000, "output": 8000 } } }
    }
  }
}
END

ask() {
  opencode run --format json "$QUESTION"
}

go_on() {
  opencode run --continue --format json "$QUESTION"
}

"$1" | tee -a events.jsonl | grep '"type":"text"'
