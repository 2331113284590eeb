// The REST of this page's gateway. The cookie says who asks; what may change something also carries the CSRF token.
import { useCallback, useEffect, useRef, useState } from "./dom.js";

let csrf = "";
let signedOut = () => {};

// An answer that is an error, in the contract's words. `status` 0: no answer came.
export class ApiError extends Error {
  constructor(status, { message, type = null, param = null, code = null } = {}) {
    super(message || `the gateway answered with status ${status}, and without words`);
    this.name = "ApiError";
    Object.assign(this, { status, type, param, code });
  }
}

// `body` is sent as JSON. Resolves to the JSON of the answer; rejects with an ApiError. An aborted request rejects with
// the AbortError of fetch.
export async function request(method, path, body = undefined, { signal } = {}) {
  const headers = { accept: "application/json" };
  if (body !== undefined) headers["content-type"] = "application/json";
  if (csrf && method !== "GET") headers["x-weir-csrf"] = csrf;
  let reply;
  try {
    reply = await fetch(path, {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      credentials: "same-origin",
      redirect: "error",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { message: "the gateway does not answer" });
  }
  const answer = await reply.json().catch((error) => {
    if (signal?.aborted) throw error;
    return null; // a proxy's page, or an answer that broke off
  });
  if (reply.ok && answer !== null) return answer;
  if (reply.status === 401 && path !== "/page/session") signedOut();
  throw new ApiError(reply.status, answer?.error);
}

export const get = (path, options) => request("GET", path, undefined, options);
export const post = (path, body = {}, options) => request("POST", path, body, options);
export const remove = (path, options) => request("DELETE", path, undefined, options);

// Who is signed in: {role, key, model, needs_key, page}; a `role` of null: nobody.
export async function readSession() {
  return keep(await get("/page/session"));
}

export async function signIn(apiKey) {
  return keep(await post("/page/session", { api_key: apiKey }));
}

export async function signOut() {
  return keep(await remove("/page/session"));
}

export function onSignedOut(listener) {
  signedOut = listener;
}

function keep(session) {
  csrf = session.csrf;
  return session;
}

// The answer to a GET, in a component: {data, error, loading, reload}. While it is read again, the former data stay.
// `path` null reads nothing. A change of `again` reads again, once the read that is under way has ended.
export function useGet(path, again = null) {
  const unread = { path, data: null, error: null, loading: path !== null };
  const [state, setState] = useState(unread);
  const reader = useRef(null);
  useEffect(() => {
    if (path === null) return undefined;
    const own = { stopped: new AbortController(), running: false, wanted: false };
    reader.current = own;
    return () => {
      own.stopped.abort();
      reader.current = null;
    };
  }, [path]);
  const reload = useCallback(async () => {
    const own = reader.current;
    if (own === null) return;
    own.wanted = true;
    if (own.running) return;
    own.running = true;
    while (own.wanted && !own.stopped.signal.aborted) {
      own.wanted = false;
      const read = await get(path, { signal: own.stopped.signal }).then(
        (data) => ({ data, error: null }),
        (error) => ({ error }),
      );
      if (own.stopped.signal.aborted) return;
      setState((former) => ({ ...(former.path === path ? former : unread), ...read, loading: false }));
    }
    own.running = false;
  }, [path]);
  useEffect(() => {
    reload();
  }, [reload, again]);
  return { ...(state.path === path ? state : unread), reload };
}
