// The page: its theme, the tip at the pointer or the focus, the list of warnings, and the live data of a run.

const POLL_MS = 2000;

function themeButton(button) {
  const root = document.documentElement, system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const label = () => { button.textContent = isDark() ? "Light colours" : "Dark colours"; };
  try {
    const kept = localStorage.getItem("theme");
    if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  } catch { /* a page of a file may have no storage */ }
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("theme", root.dataset.theme); } catch { /* as above */ }
    label();
  });
  system.addEventListener("change", label);
  label();
}

function tipView(element) {
  let where = null;

  // Below the place, or above it if there is no room, and never outside the window.
  function put() {
    element.style.left = element.style.top = "0"; // at the window's edge it would be narrow
    const place = where(), {width, height} = element.getBoundingClientRect();
    const below = place.bottom + 8;
    const left = Math.max(8, Math.min(place.right + 6, innerWidth - width - 8));
    const top = below + height < innerHeight ? below : Math.max(8, place.top - height - 8);
    element.style.left = `${left}px`;
    element.style.top = `${top}px`;
  }

  addEventListener("scroll", () => { if (!element.hidden) put(); }, {passive: true, capture: true});
  return {
    show(rows, place) {
      where = place;
      element.replaceChildren(...rows);
      element.hidden = false;
      put();
    },
    hide() { element.hidden = true; },
    text: () => [...element.children].map((row) => row.innerText.replace(/\s+/g, " ")).join(", "),
  };
}

const spoken = html("div", {"aria-live": "polite", class: "spoken"});
document.body.append(spoken);
const announce = (text) => { spoken.textContent = text; };
const tip = tipView(document.getElementById("tip"));
themeButton(document.getElementById("theme"));

const curves = curveView(document.getElementById("curves"), tip, announce);
const answers = document.getElementById("samples") ? sampleView(document.getElementById("samples"), tip, announce) : null;
const warnings = document.getElementById("warnings"), messages = document.getElementById("messages");

function showMessages(found) {
  const now = JSON.stringify(found);
  if (messages.dataset.now === now) return;
  messages.dataset.now = now;
  warnings.hidden = document.getElementById("to-warnings").hidden = !found.length;
  messages.replaceChildren(...found.map(({step, text}) => {
    const button = html("button", {type: "button"}, `step ${step}`);
    button.addEventListener("focus", () => curves.moveCursors(step));
    button.addEventListener("click", () => {
      document.getElementById("curves").scrollIntoView({block: "nearest"});
      requestAnimationFrame(() => curves.showStep(step));
    });
    button.addEventListener("blur", () => curves.hide());
    return html("li", {}, button, html("span", {}, text));
  }));
}

function show(data) {
  curves.set(data);
  showMessages(data.messages);
  if (answers) {
    answers.set(data);
    document.getElementById("to-answers").hidden = !data.samples.length;
  }
}

let data = JSON.parse(document.getElementById("data").textContent);
show(data);

const live = document.getElementById("live");
if (live) {
  const tell = (text) => { if (live.textContent !== text) live.textContent = text; };
  const ask = async (name) => {
    const reply = await fetch(name, {cache: "no-store"});
    const body = await reply.json();
    if (!reply.ok) throw new Error(body.error);
    return body;
  };
  const poll = async () => {
    try {
      const {version} = await ask("version.json");
      if (version !== data.version) {
        data = await ask("data.json");
        document.getElementById("overview").innerHTML = data.overview;
        show(data);
      }
      tell("Live: the page follows the run.");
    } catch (error) {
      tell(error instanceof TypeError ? "Not live: the server of this page does not answer." : `Not live: ${error.message}`);
    }
    setTimeout(poll, POLL_MS);
  };
  setTimeout(poll, POLL_MS);
}
