// The console: its views by the address after #, and the key for a server that needs one.
import { NEEDS_KEY, read, root, storeKey, storedKey } from "./api.js";
import { Guarded, html, lazy, Problem, render, useEffect, useRef, useState } from "./html.js";
import { Models } from "./models.js";

const Live = lazy(() => import("./live.js"), "Live");
const ModelView = lazy(() => import("./model.js"), "ModelView");
const Requests = lazy(() => import("./requests.js"), "Requests");
const RequestView = lazy(() => import("./requests.js"), "RequestView");

function useAddress() {
  const [address, setAddress] = useState(location.hash);
  useEffect(() => {
    const changed = () => setAddress(location.hash);
    addEventListener("hashchange", changed);
    changed(); // it may have changed since the page was rendered
    return () => removeEventListener("hashchange", changed);
  }, []);
  return address.replace(/^#\/?/, "").split("/").map(decodePart);
}

function decodePart(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // typed by hand; no model has this name
  }
}

function KeyForm({ message, onKey }) {
  const [isWrong, setIsWrong] = useState(false);
  const input = useRef(null);
  useEffect(() => input.current.focus());
  const submit = (event) => {
    event.preventDefault();
    const key = input.current.value.trim();
    const canBeSent = /^[\x21-\x7e]+$/.test(key); // in a header
    setIsWrong(!canBeSent);
    if (canBeSent) onKey(key);
  };
  return html`<form class="card narrow" onSubmit=${submit}>
    <label for="key">This server needs an API key.</label>
    <input id="key" ref=${input} type="password" autocomplete="off" required aria-invalid=${isWrong || message ? "true" : undefined} />
    <button class="primary">Open</button>
    ${(isWrong || message) && html`<p class="error" role="alert">${isWrong ? "A key has only letters, digits and signs of ASCII, without spaces." : message}</p>`}
  </form>`;
}

function App() {
  const [view, name, version] = useAddress();
  const [server, setServer] = useState(null);
  const [problem, setProblem] = useState(null);

  async function connect() {
    try {
      setServer(await read("/v2"));
      setProblem(null);
    } catch (error) {
      setProblem(error);
    }
  }
  useEffect(() => {
    addEventListener(NEEDS_KEY, ({ detail }) => setProblem(detail));
    connect();
  }, []);
  const isFirst = useRef(true);
  useEffect(() => {
    document.title = [name || (view && view !== "models" ? view : ""), "Dragoman"].filter(Boolean).join(" - ");
    if (!isFirst.current) document.getElementById("main").focus(); // the link that was followed may be gone
    isFirst.current = false;
  }, [view, name, version]);

  function useKey(key) {
    storeKey(key);
    connect();
  }

  const needsKey = problem?.status === 401 || problem?.status === 403;
  let page;
  if (needsKey) {
    page = html`<${KeyForm} message=${storedKey() && `${problem.status === 403 ? "This key has not the role that the console needs" : "This key is not accepted"}: ${problem.message}`} onKey=${useKey} />`;
  } else if (problem) {
    page = html`<${Problem} message=${problem.message} onRetry=${connect} />`;
  } else if (!server) {
    page = html`<p class="note">Loading …</p>`;
  } else if (view === "models" && name) {
    page = html`<${ModelView} key=${`${name}/${version}`} name=${name} version=${version ?? ""} server=${server} />`;
  } else if (view === "live") {
    page = html`<${Live} />`;
  } else if (view === "requests") {
    page = name ? html`<${RequestView} id=${name} />` : html`<${Requests} />`;
  } else {
    page = html`<${Models} />`;
  }
  const link = (title, href, is) => html`<a href=${href} aria-current=${is ? "page" : undefined}>${title}</a>`;
  return html`<a class="skip" href="#main" onClick=${skip}>Skip to the content</a>
    <header><div class="bar">
      <a class="brand" href="#/"><${Mark} /><span>Dragoman</span></a>
      <nav aria-label="Views">
        ${link("Models", "#/", view === "" || view === "models")} ${link("Live", "#/live", view === "live")}
        ${link("Requests", "#/requests", view === "requests")} ${link("API", `${root}/docs`, false)}
      </nav>
      ${storedKey() && html`<button class="small" aria-label="Forget the key" onClick=${() => useKey("")}>Forget<span> the key</span></button>`}</div>
    </header>
    <main id="main" tabindex="-1"><${Guarded} key=${`${view}/${name}/${version}`}>${page}</${Guarded}></main>
    <footer>${server && `${server.name} ${server.version}`}</footer>`;
}

// The address after # is that of a view, so that a link cannot name a place in it.
function skip(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}

const Mark = () => html`<svg viewBox="0 0 24 24" width="22" height="22" aria-hidden="true"><rect width="24" height="24" rx="6" />
  <path d="M6 8h8a4 4 0 0 1 0 8H6M9 5 6 8l3 3M9 13l-3 3 3 3" /></svg>`;

const holder = document.getElementById("app");
holder.replaceChildren();
render(html`<${App} />`, holder);
