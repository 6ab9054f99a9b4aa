// The console: its views by the address after #, and the key for a server that needs one.
import { read, send, storeKey, storedKey } from "./api.js";
import { html, render, useEffect, useRef, useState } from "./html.js";
import { Live } from "./live.js";
import { ModelView } from "./model.js";
import { Models } from "./models.js";
import { Requests, RequestView } from "./requests.js";

function useAddress() {
  const [address, setAddress] = useState(location.hash);
  useEffect(() => {
    const changed = () => setAddress(location.hash);
    addEventListener("hashchange", changed);
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
  const submit = (event) => {
    event.preventDefault();
    onKey(event.target.elements.key.value.trim());
  };
  return html`<form class="card narrow" onSubmit=${submit}>
    <label for="key">This server needs an API key.</label>
    <input id="key" name="key" type="password" autocomplete="off" required autofocus />
    <button class="primary">Open</button>
    ${message && html`<p class="error" role="alert">${message}</p>`}
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
  useEffect(() => void connect(), []);
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
    page = html`<p class="error" role="alert">${problem.message} <button onClick=${connect}>Try again</button></p>`;
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
  const current = (is) => (is ? "page" : undefined);
  return html`<a class="skip" href="#main">Skip to the content</a>
    <header>
      <a class="brand" href="#/">Dragoman</a>
      <nav aria-label="Views">
        <a href="#/" aria-current=${current(view === "" || view === "models")}>Models</a>
        <a href="#/live" aria-current=${current(view === "live")}>Live</a>
        <a href="#/requests" aria-current=${current(view === "requests")}>Requests</a>
        <a href="docs">API</a>
      </nav>
      <span class="server">${server && `${server.name} ${server.version}`}</span>
      ${storedKey() && html`<button onClick=${() => useKey("")}>Forget the key</button>`}
    </header>
    <main id="main" tabindex="-1">${page}</main>`;
}

const holder = document.getElementById("app");
holder.replaceChildren();
render(html`<${App} />`, holder);
