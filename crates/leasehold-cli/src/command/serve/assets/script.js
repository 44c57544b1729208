// Keeps the page up to date, and asks before an action. Without it pages work, but have to be reloaded.
"use strict";
(() => {
  const connection = document.getElementById("connection");
  const dialog = document.getElementById("dialog");
  const fragmentOnly = { headers: { "leasehold-fragment": "1" }, cache: "no-store" };

  // Makes `from` look like `to`. Elements are kept where possible. So the focus, the scroll
  // position, open details and text that is being typed are kept as well.
  const same = (a, b) =>
    a.nodeType === b.nodeType && a.nodeName === b.nodeName && key(a) === key(b);
  const key = (node) =>
    node.nodeType === 1 ? node.id || node.getAttribute("data-key") || "" : "";
  const keeps = (element, name) =>
    (name === "open" && element.nodeName === "DETAILS") ||
    ((name === "value" || name === "selected") && /^(INPUT|OPTION|TEXTAREA)$/.test(element.nodeName) && element.type !== "hidden");
  function sync(from, to) {
    if (from.nodeType !== 1) {
      if (from.nodeValue !== to.nodeValue) from.nodeValue = to.nodeValue;
      return;
    }
    for (const { name } of [...from.attributes]) {
      if (!to.hasAttribute(name) && !keeps(from, name)) from.removeAttribute(name);
    }
    for (const { name, value } of to.attributes) {
      if (from.getAttribute(name) !== value && !keeps(from, name)) from.setAttribute(name, value);
    }
    const keyed = new Map();
    for (const child of from.childNodes) if (key(child)) keyed.set(key(child), child);
    let at = from.firstChild;
    for (const wanted of [...to.childNodes]) {
      const found = key(wanted) ? keyed.get(key(wanted)) : at;
      if (found && same(found, wanted) && found.parentNode === from) {
        if (found !== at) from.insertBefore(found, at);
        else at = at.nextSibling;
        sync(found, wanted);
      } else {
        from.insertBefore(wanted, at);
      }
    }
    while (at) {
      const next = at.nextSibling;
      at.remove();
      at = next;
    }
  }

  let fetching = false;
  let again = false;
  async function refresh() {
    // One request at a time, so that a slow server is not asked twice.
    if (fetching) {
      again = true;
      return;
    }
    fetching = true;
    try {
      const response = await fetch(location.href, fragmentOnly);
      if (response.redirected || response.status === 401) location.reload();
      const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
      const part = fresh.getElementById("live");
      if (part) sync(document.getElementById("live"), part);
      else if (response.status === 404) say(fresh.querySelector("p").textContent);
    } catch {
      // The stream reports the error as well, and starts the next attempt.
    } finally {
      fetching = false;
      if (again) {
        again = false;
        refresh();
      }
    }
  }

  function say(text) {
    if (connection.textContent !== text) connection.textContent = text;
  }

  // Browsers allow few connections to one server, so a hidden tab has none.
  let stream = null;
  let retry = 0;
  function connect() {
    clearTimeout(retry);
    if (stream || document.hidden) return;
    stream = new EventSource("/live");
    stream.addEventListener("version", () => {
      say("");
      refresh();
    });
    stream.addEventListener("error", () => {
      say("The console does not answer. Retrying.");
      if (stream && stream.readyState === EventSource.CLOSED) {
        disconnect();
        retry = setTimeout(connect, 5000);
      }
    });
  }
  function disconnect() {
    if (stream) stream.close();
    stream = null;
  }
  if (document.body.hasAttribute("data-live")) {
    connect();
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) disconnect();
      else connect();
    });
    addEventListener("pagehide", disconnect);
    addEventListener("pageshow", connect);
  }

  // Shows the confirmation of an action in a dialog instead of on its own page.
  document.addEventListener("submit", async (event) => {
    const form = event.target;
    if (!form.hasAttribute("data-confirm") || !dialog.showModal) return;
    event.preventDefault();
    // Not `form.action`: that is the field of that name.
    const address = form.getAttribute("action") + "?" + new URLSearchParams(new FormData(form, event.submitter));
    try {
      const response = await fetch(address, fragmentOnly);
      const question = new DOMParser().parseFromString(await response.text(), "text/html");
      dialog.replaceChildren(...question.body.childNodes);
      dialog.showModal();
    } catch {
      location.href = address;
    }
  });
  dialog.addEventListener("click", (event) => {
    if (event.target.classList.contains("cancel")) {
      event.preventDefault();
      dialog.close();
    }
  });
})();
