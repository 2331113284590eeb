# The calls of a user who has only curl. Base URL and key come from the environment, as for the SDKs.
set -eu

hello='"messages": [{"role": "user", "content": "value of c?"}]'

chat() {
  curl -sS "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
    -H 'Content-Type: application/json' -d "{\"model\": \"policy\", $hello}"
}

stream() {
  curl -sSN "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
    -H 'Content-Type: application/json' -d "{\"model\": \"policy\", \"stream\": true, $hello}" |
    sed -n 's/^data: //p' | grep -v '^\[DONE\]' | tail -1
}

messages() {
  curl -sS "$ANTHROPIC_BASE_URL/v1/messages" -H "x-api-key: $ANTHROPIC_API_KEY" \
    -H 'Content-Type: application/json' -d "{\"model\": \"policy\", \"max_tokens\": 16, $hello}"
}

by_header() {
  curl -sS "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
    -H "x-session-id: $SESSION_ID" -H 'Content-Type: application/json' -d "{\"model\": \"policy\", $hello}"
}

"$1"
