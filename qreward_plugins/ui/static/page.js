// Keys, a note of new samples, and parts that are loaded again. The page works without it.
"use strict";

const go = (id) => document.getElementById(id)?.click();

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
  const rows = [...document.querySelectorAll("#rows a")];
  const at = rows.indexOf(document.activeElement);
  const actions = {
    ArrowLeft: () => go("before"),
    ArrowRight: () => go("after"),
    n: () => go("next"),
    p: () => go("previous"),
    Escape: () => go("back"),
    "/": () => document.getElementById("search")?.focus(),
    j: () => rows[Math.min(rows.length - 1, at + 1)]?.focus(),
    k: () => rows[Math.max(0, at - 1)]?.focus(),
  };
  if (actions[event.key]) {
    actions[event.key]();
    event.preventDefault();
  }
});

for (const form of document.querySelectorAll("form.bar")) {
  form.addEventListener("change", (event) => event.target.matches("select") && form.requestSubmit());
}

let first = null;
new EventSource("/events").addEventListener("message", (event) => {
  const entries = Number(event.data);
  first ??= entries;
  if (entries > first) {
    const news = document.getElementById("news");
    news.textContent = `${(entries - first).toLocaleString("en")} new entries: load again`;
    news.hidden = false;
  }
});

// The sources of a run that goes on, and what is still being computed.
setInterval(async () => {
  const part = document.querySelector("#live, [aria-busy]");
  if (!part || document.hidden || part.contains(document.activeElement)) return;
  const answer = await fetch(location.href).catch(() => null);
  if (!answer?.ok) {
    if (answer && part.ariaBusy) location.reload();
    return;
  }
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById(part.id);
  if (fresh) part.replaceWith(fresh);
}, 1000);
