// Show the OpenAPI document of this page in Swagger UI. Asks for an API key if the server wants one.

const form = document.getElementById("key");
const problem = document.getElementById("problem");
const address = new URL(document.body.dataset.document, location.href);
const MAX_LISTED = 40; // operations; of more only the groups are shown at first
const STORED = "dragoman-api-key"; // for this tab, until it is closed

// The page of a model leads back to that model.
const model = /\/v2\/models\/([^/]+)(?:\/versions\/([^/]+))?\/docs$/.exec(location.pathname);
if (model) document.getElementById("back").href += `#/models/${model[1]}${model[2] ? `/${model[2]}` : ""}`;

function withKey(headers = {}) {
  const key = sessionStorage.getItem(STORED);
  return key ? { ...headers, Authorization: `Bearer ${key}` } : headers;
}

function show(spec) {
  document.title = `${spec.info.title} API`;
  // The document names the server by the path that a proxy adds; a path that this page was reached by is right too.
  const root = new URL(document.querySelector('script[type="module"]').src).pathname.replace(/\/docs\/assets\/.*$/, "");
  spec.servers = [{ url: root || "/" }];
  globalThis.SwaggerUIBundle({
    spec,
    dom_id: "#api",
    deepLinking: true,
    docExpansion: Object.keys(spec.paths).length > MAX_LISTED ? "none" : "list",
    filter: true,
    tryItOutEnabled: true,
    validatorUrl: null, // no request to another host
    requestInterceptor(request) {
      if (new URL(request.url, location.href).origin === location.origin) {
        request.headers = withKey(request.headers);
      }
      return request;
    },
  });
}

async function load() {
  const main = document.getElementById("api");
  let response;
  try {
    response = await fetch(address, { headers: withKey(), credentials: "same-origin" });
  } catch {
    main.textContent = "The server cannot be reached.";
    return;
  }
  if (response.status === 401 || response.status === 403) {
    problem.textContent = sessionStorage.getItem(STORED) ? "This key is not accepted here." : "";
    main.textContent = "";
    form.hidden = false;
    document.getElementById("secret").focus();
  } else if (response.ok) {
    form.hidden = true;
    show(await response.json());
  } else {
    const body = await response.json().catch(() => ({}));
    main.textContent = body.error ?? `The server answered ${response.status}.`;
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(STORED, document.getElementById("secret").value.trim());
  load();
});
load();
