// Signing in: the key goes to the gateway once, in a body, and is kept nowhere in the browser.
import { html, useEffect, useRef, useState } from "./dom.js";
import { signIn } from "./api.js";

export function SignIn({ signedIn, ended }) {
  const input = useRef(null);
  const [error, setError] = useState(null);
  const [running, setRunning] = useState(false);
  useEffect(() => input.current.focus(), []);
  const submit = async (event) => {
    event.preventDefault();
    setRunning(true);
    setError(null);
    try {
      signedIn(await signIn(input.current.value));
    } catch (problem) {
      setError(problem.message);
      setRunning(false);
      input.current.select();
    }
  };
  return html`
    <main class="sign-in" id="content">
      <form class="card" onSubmit=${submit} autocomplete="off">
        <svg class="mark" viewBox="0 0 32 32" aria-hidden="true">
          <path d="M4 9h11c4 0 3 7 6.500 7H28M4 15h7c4 0 3 7 6.500 7H28M4 21h3c4 0 3 6 6.500 6H28" />
        </svg>
        <h1>Weir</h1>
        <p class="muted">${ended ? "You were signed out. Sign in again." : "Sign in with an API key of this gateway."}</p>
        <p class="field">
          <label for="api-key">API key</label>
          <input id="api-key" ref=${input} type="password" required maxlength="512" autocomplete="off"
            spellcheck="false" autocapitalize="off" aria-describedby=${error ? "sign-in-error" : undefined} />
        </p>
        ${error && html`<p class="refusal" role="alert" id="sign-in-error">${error}</p>`}
        <button class="primary" disabled=${running}>${running ? "One moment…" : "Sign in"}</button>
        <p class="help">An admin key shows everything, a client key its own sessions. The key stays in no browser.</p>
      </form>
    </main>
  `;
}
