# The commands of a user who runs Claude Code without its screen. Base URL and key come from the environment.
set -eu

ask() {
  claude -p "$QUESTION" --output-format json --allowed-tools "$TOOLS"
}

go_on() {
  claude -p "$QUESTION" --continue --output-format json --allowed-tools "$TOOLS"
}

streamed() {
  claude -p "$QUESTION" --output-format stream-json --verbose --include-partial-messages --allowed-tools "$TOOLS"
}

"$1"
