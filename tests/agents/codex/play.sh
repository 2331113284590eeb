# The commands of a user who runs Codex without its screen. Base URL and key come from the environment.
set -eu

export CODEX_API_KEY=$OPENAI_API_KEY
codex="codex exec --skip-git-repo-check --json --sandbox workspace-write -m policy"
codex="$codex -c openai_base_url=$OPENAI_BASE_URL"

ask() {
  $codex "$QUESTION"
}

go_on() {
  $codex resume --last "$QUESTION"
}

"$1" | tee events.jsonl | grep agent_message
