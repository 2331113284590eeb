// Which view is shown, by the URL's hash: `#/sessions/s-1?verdict=stale`. The hash is never sent to a server.
import { useEffect, useState } from "./dom.js";

// {view: "sessions", path: ["s-1"], query: {verdict: "stale"}}; view "" for an empty hash.
export function parse(hash) {
  const [whole, search = ""] = hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  const [view, ...path] = whole.split("/").filter(Boolean).map(decoded);
  return { view: view ?? "", path, query: Object.fromEntries(new URLSearchParams(search)) };
}

// The hash of a view, for `href`. Empty values of the query are left out.
export function link(view, path = [], query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const search = new URLSearchParams(given).toString();
  return `#/${[view, ...path].map(encodeURIComponent).join("/")}${search ? `?${search}` : ""}`;
}

// What of an address a view does not know: {path} or {query: [[name, value], …]}; null if it knows all. `knows`: {path: how many parts its path may have,
// or a pattern of the whole path; query: {name: pattern of its value}}.
export function stray({ path, query }, knows) {
  const places = path.join("/");
  const fits = knows.path instanceof RegExp ? knows.path.test(places) : path.length <= (knows.path ?? 0);
  if (!fits) return { path: places };
  const odd = Object.entries(query).filter(([name, value]) => !Object.hasOwn(knows.query ?? {}, name) || !knows.query[name].test(value));
  return odd.length ? { query: odd } : null;
}

export function go(view, path, query) {
  location.hash = link(view, path, query);
}

export function useRoute() {
  const [route, setRoute] = useState(() => parse(location.hash));
  useEffect(() => {
    const changed = () => setRoute(parse(location.hash));
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return route;
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
