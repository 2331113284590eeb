// The frame around the views: header, navigation, the heading, signing in and out, the theme, notices.
import { html, useCallback, useEffect, useErrorBoundary, useLayoutEffect, useRef, useState } from "./dom.js";
import { onSignedOut, readSession, signOut } from "./api.js";
import { announce, Dialogs } from "./dialogs.js";
import { onEnded, useLive } from "./live.js";
import { ErrorNote, Icon, Loading } from "./parts.js";
import { link, stray, useRoute } from "./router.js";
import { SignIn } from "./sign_in.js";
import { visible } from "./views/visible.js";

const ASSETS = new URL(".", import.meta.url);
const loaded = new Map(); // view id -> its component
const MOST_SHOWN = 120; // characters of an address
let setHeading = () => {};

// Show another heading than the view's title.
export function useHeading(text) {
  useEffect(() => {
    setHeading(text);
    return () => setHeading(null);
  }, [text]);
}

export function Shell({ views }) {
  const [me, setMe] = useState(null);
  const [ended, setEnded] = useState(false);
  const [error, setError] = useState(null);
  const leave = useCallback(() => {
    setEnded(true);
    setMe((former) => former && { ...former, role: null });
  }, []);
  const read = useCallback(() => readSession().then(setMe, setError), []);
  useEffect(() => {
    onSignedOut(leave);
    onEnded(leave);
    read();
  }, []);
  if (error && !me) return html`<main class="sign-in"><${ErrorNote} error=${error} again=${() => location.reload()} /></main>`;
  if (!me) return html`<main class="sign-in"><${Loading} /></main>`;
  if (me.role === null) return html`<${SignIn} signedIn=${setMe} ended=${ended} />`;
  const out = async () => {
    try {
      await signOut();
      setEnded(false);
      setMe({ ...me, role: null });
    } catch (problem) {
      announce(`You are still signed in: ${problem.message}`);
    }
  };
  return html`<${Frame} views=${views.filter((each) => each.roles.includes(me.role))} me=${me} out=${out} />`;
}

function Frame({ views, me, out }) {
  const route = useRoute();
  const view = views.find((each) => each.id === route.view) ?? (route.view ? null : views[0]);
  const [heading, changeHeading] = useState(null);
  setHeading = changeHeading;
  const odd = view && stray(route, view.knows);
  const shown = odd?.path === undefined ? view : null;
  const title = (shown && heading) ?? shown?.title ?? "Not found";
  const first = useRef(true);
  const focused = useRef(null);
  const place = `${route.view}/${route.path.join("/")}`;
  useEffect(() => {
    document.title = `${title} · Weir`;
  }, [title]);
  useEffect(() => {
    if (!first.current) {
      focused.current?.focus({ preventScroll: true });
      scrollTo(0, 0);
    }
    first.current = false;
  }, [place]);
  return html`
    <a class="skip" href="#content" onClick=${skip}>Skip to content</a>
    <header class="top">
      <a class="brand" href=${link(views[0]?.id ?? "")}>
        <svg class="mark" viewBox="0 0 32 32" aria-hidden="true">
          <path d="M4 9h11c4 0 3 7 6.500 7H28M4 15h7c4 0 3 7 6.500 7H28M4 21h3c4 0 3 6 6.500 6H28" />
        </svg>
        <span>Weir</span> <span class="model">${me.model}</span>
      </a>
      <div class="tools">
        ${me.role === "admin" && html`<${Connection} page=${me.page} />`}
        <${ThemeSwitch} />
        ${me.needs_key &&
        html`<span class="who" title="The key that you signed in with">${me.key}</span>
          <button class="quiet" onClick=${out}><${Icon} name="leave" /><span class="narrow-hidden">Sign out</span></button>`}
      </div>
    </header>
    <nav class="nav" aria-label="Views">
      <ul>
        ${views.map(
          (each) => html`<li>
            <a href=${link(each.id)} aria-current=${each === view ? "page" : undefined}>
              <${Icon} name=${each.icon} /><span>${each.title}</span>
            </a>
          </li>`,
        )}
      </ul>
    </nav>
    <main class="content" id="content" tabindex="-1">
      <h1 ref=${focused} tabindex="-1">${title}</h1>
      ${odd?.query && html`<p class="refusal" role="alert">${ignored(odd.query)}</p>`}
      ${shown
        ? html`<${Outlet} key=${view.id} view=${view} route=${route} me=${me} />`
        : html`<p>${view ? `${view.title} has nothing at “${visible(odd.path).slice(0, MOST_SHOWN)}”.` : "There is no view of this name, or your key does not open it."} <a href=${link(view?.id ?? views[0]?.id ?? "")}>${view?.title ?? views[0]?.title}</a></p>`}
    </main>
    <${Dialogs} />
  `;
}

function ignored(odd) {
  const parts = odd.slice(0, 3).map(([name, value]) => `${visible(name)}=${visible(value)}`.slice(0, MOST_SHOWN));
  return `This view does not know a part of the address, and ignores it: ${parts.join(", ")}.`;
}

// Loads the view's module and style sheet, then shows it.
function Outlet({ view, route, me }) {
  const [problem, resetProblem] = useErrorBoundary((error) => console.error(error));
  const [View, setView] = useState(() => loaded.get(view.id) ?? null);
  const [missing, setMissing] = useState(null);
  useLayoutEffect(() => {
    if (View) return;
    if (view.style) addStyle(view.style);
    view.load().then(
      (module) => {
        loaded.set(view.id, module.default);
        setView(() => module.default);
      },
      () => setMissing(new Error("This view could not be loaded. Weir may have been updated: load the page again.")),
    );
  }, [view]);
  if (missing) return html`<${ErrorNote} error=${missing} again=${() => location.reload()} />`;
  if (problem) return html`<${ErrorNote} error=${problem} again=${resetProblem} />`;
  return View ? html`<${View} route=${route} me=${me} />` : html`<${Loading} />`;
}

function addStyle(name) {
  const href = new URL(`views/${name}`, ASSETS).href;
  if ([...document.styleSheets].some((sheet) => sheet.href === href)) return;
  const sheet = document.createElement("link");
  Object.assign(sheet, { rel: "stylesheet", href });
  document.head.append(sheet);
}

function skip(event) {
  event.preventDefault();
  document.getElementById("content").focus();
}

const WORDS = { live: "Live", connecting: "Connecting…", lost: "Reconnecting…" };

function Connection({ page }) {
  const { connection, picture } = useLive();
  const updated = picture && picture.page !== page;
  return html`
    ${updated && html`<button class="quiet" onClick=${() => location.reload()}>Weir was updated: load again</button>`}
    <span class="connection" data-state=${connection} role="status"><i aria-hidden="true"></i>${WORDS[connection]}</span>
  `;
}

function ThemeSwitch() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const [theme, setTheme] = useState(document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light"));
  const other = theme === "dark" ? "light" : "dark";
  const change = () => {
    document.documentElement.dataset.theme = other;
    try {
      localStorage.setItem("weir-theme", other);
    } catch {
      // it is only forgotten
    }
    setTheme(other);
  };
  return html`<button class="quiet icon" onClick=${change} aria-label=${`Use the ${other} theme`} title=${`Use the ${other} theme`}>
    <${Icon} name=${theme === "dark" ? "sun" : "moon"} />
  </button>`;
}
