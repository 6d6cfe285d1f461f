// The page: asks worker.js for plans, and starts and follows jobs. Texts of others are only ever set as text; the HTML
// of plans and problems comes from openquant/web/view.py, which escapes them.

import { Hub, path } from "./hub.js";
import { ENDED, Jobs, jobCommand, limit, machineFor, secondsOf, targetOf } from "./job.js";
import { SignInError, canSignIn, signIn, signedIn } from "./signin.js";

const MOST_LINES = 2000;
// Milliseconds between looks at a job.
const BETWEEN_LOOKS = 2000;

const byId = (id) => document.getElementById(id);
const built = await (await fetch("./build.json")).json();
// The visitor: {token, expires, name}, or null. It is nowhere but here and in the requests.
let visitor = null;
let shown = null;
let choices = null;
let followed = null;

// The planner

const worker = new Worker("./worker.js", { type: "module" });
const waiting = new Map();
let requests = 0;

worker.onmessage = ({ data }) => {
  if ("loaded" in data) return showLoaded(data);
  const { resolve, reject, say } = waiting.get(data.id);
  if ("progress" in data) return say(data.progress);
  waiting.delete(data.id);
  if ("failed" in data) reject(Object.assign(new Error(data.failed.message), { status: data.failed.status }));
  else resolve(data.answer);
};
worker.onerror = () => {
  for (const { reject } of waiting.values()) reject(new Error("The planner cannot run in this browser."));
  waiting.clear();
};

function showLoaded({ loaded, total }) {
  const [done, all] = [loaded, total].map((count) => Math.round(count / 1e6));
  say(loaded < total ? `Loading the planner: ${done} of ${all} MB` : "Starting the planner");
}

function ask(message, say = () => {}) {
  const id = ++requests;
  return new Promise((resolve, reject) => {
    waiting.set(id, { resolve, reject, say });
    worker.postMessage({ ...message, id });
  });
}

function hub() {
  return new Hub(built.hub, visitor?.token ?? "");
}

// The form

function offer(found) {
  choices = found;
  const sheet = new CSSStyleSheet();
  sheet.replaceSync(found.style);
  document.adoptedStyleSheets = [sheet];
  for (const name of found.gpus) byId("gpus").append(new Option(name, name));
  for (const { name, about } of found.schemes) byId("scheme").append(new Option(`${name}: ${about}`, name));
  for (const option of found.options) byId("options").append(...control(option));
  byId("about").textContent = `openquant ${found.version}. Plans are made in your browser, from headers alone.`;
}

function control({ name, flag, help, value, choices: allowed, repeated }) {
  const label = document.createElement("label");
  const about = document.createElement("span");
  const id = `option-${name}`;
  about.className = "help";
  about.id = `${id}-help`;
  about.textContent = repeated ? `${help} Separate several by spaces.` : help;
  let input;
  if (allowed) {
    input = document.createElement("select");
    input.append(new Option("", ""), ...allowed.map((one) => new Option(one, one)));
  } else {
    input = document.createElement("input");
    if (value === null) input.type = "checkbox";
    else input.maxLength = 1000;
  }
  input.id = id;
  input.setAttribute("aria-describedby", about.id);
  input.autocomplete = "off";
  label.htmlFor = id;
  if (value === null) {
    label.className = "check";
    label.append(input, ` ${flag}`);
    return [label, about];
  }
  label.textContent = flag;
  return [label, input, about];
}

function options() {
  const given = {};
  for (const { name, value } of choices?.options ?? []) {
    const input = byId(`option-${name}`);
    given[name] = value === null ? input.checked : input.value.trim();
  }
  return given;
}

function form() {
  const given = { options: options() };
  for (const name of ["repo", "revision", "gpu", "context", "scheme", "target"]) given[name] = byId(name).value.trim();
  return { ...given, private: byId("private").checked };
}

function fill(given) {
  for (const name of ["repo", "revision", "gpu", "context", "scheme", "target"]) byId(name).value = given[name] ?? "";
  byId("private").checked = given.private === true;
  for (const { name, value } of choices.options) {
    if (value === null) byId(`option-${name}`).checked = given.options?.[name] === true;
    else byId(`option-${name}`).value = given.options?.[name] ?? "";
  }
}

let searching = 0;

byId("repo").addEventListener("input", () => {
  clearTimeout(searching);
  const typed = byId("repo").value.trim();
  if (typed.length < 3) return;
  searching = setTimeout(async () => {
    const found = await hub().json(`/api/models?search=${encodeURIComponent(typed)}&filter=safetensors&limit=8`).catch((error) => complain(error.message));
    const names = Array.isArray(found) ? found.map((model) => model?.id).filter((name) => typeof name === "string") : [];
    byId("repos").replaceChildren(...names.map((name) => new Option(name, name)));
  }, 300);
});

// A row of the table of schemes is a choice.
byId("table").addEventListener("click", ({ target }) => {
  const row = target.closest("tr")?.querySelector("button");
  if (!row) return;
  byId("scheme").value = row.value;
  byId("form").requestSubmit();
});

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  byId("target").value = "";
  showPlan();
});

function say(text) {
  // What is said again would be read out again.
  if (byId("progress").textContent !== text) byId("progress").textContent = text;
}

function complain(message) {
  const box = document.createElement("div");
  box.className = "oq oq-problem";
  box.setAttribute("role", "alert");
  box.textContent = message;
  byId("problem").replaceChildren(box);
}

async function showPlan() {
  const asked = form();
  byId("show").disabled = true;
  byId("problem").replaceChildren();
  byId("result").hidden = byId("convert").hidden = true;
  try {
    if (!/^[\w.-]+\/[\w.-]+$/.test(asked.repo)) throw new Error("Give a repository such as Qwen/Qwen3-8B.");
    const found = await ask({ kind: "plan", hub: built.hub, token: visitor?.token ?? "", ...asked }, say);
    if ("problem" in found) {
      byId("problem").innerHTML = found.problem;
      return;
    }
    byId("table").innerHTML = found.table;
    byId("plan").innerHTML = found.html;
    byId("result").hidden = false;
    await showConversion(found);
    byId("result").focus();
  } catch (error) {
    complain(error.message);
  } finally {
    byId("show").disabled = false;
    say("");
  }
}

// The conversion

function words() {
  const target = byId("target").value.trim() || shown.target;
  const given = shown.words.filter((word) => !word.startsWith("--push-to-hub="));
  return [...given, `--push-to-hub=${target}`, ...(byId("private").checked ? ["--private"] : [])];
}

function showCommand() {
  byId("command").textContent = ["openquant", ...words()].map((word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`)).join(" ");
}

async function showConversion(found) {
  shown = found;
  if (byId("target").value === "") byId("target").value = found.target;
  showCommand();
  byId("convert").hidden = false;
  const { machine, enough } = await machineFor(hub(), found.disk);
  if (shown !== found) return;
  found.machine = machine;
  const cost = (seconds) => money(Math.ceil(seconds / 60) * machine.unitCostUSD);
  byId("forecast").textContent =
    `A job on your account: ${machine.prettyName ?? machine.name} (${machine.cpu}, ${machine.ram}). About ${spoken(found.seconds)} and ${cost(found.seconds)}; ` +
    `it is stopped after ${spoken(limit(found.seconds))}, which would cost ${cost(limit(found.seconds))}. It needs ${gigabytes(found.disk)} of disk.` +
    (enough ? "" : ` No machine is known to have so much: ${machine.name} has ${machine.ephemeralStorage}.`);
  warn();
}

// Say before a conversion that the sign-in would not last as long.
function warn() {
  byId("start").textContent = visitor ? "Start the job" : "Sign in and start a job";
  byId("start").disabled = !canSignIn();
  const ends = visitor?.expires && shown ? visitor.expires : null;
  const short = ends !== null && ends < Date.now() + 1000 * shown.seconds;
  byId("expires").hidden = !short && canSignIn();
  if (short) {
    byId("expires").textContent =
      `Your sign-in ends at ${new Date(ends).toLocaleString()}, before the job would. The job then stops; sign in again, and start it once more.`;
  } else if (!canSignIn()) {
    byId("expires").textContent = "There is no sign-in here: run the command, or open this page as a Space.";
  }
}

function money(dollars) {
  return dollars < 0.01 ? "less than $0.01" : `$${dollars.toFixed(2)}`;
}

function gigabytes(count) {
  return `${(count / 1e9).toPrecision(2)} GB`;
}

function spoken(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} seconds`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} minutes`;
  return `${(seconds / 3600).toFixed(1)} hours`;
}

byId("target").addEventListener("input", showCommand);
byId("private").addEventListener("change", showCommand);
byId("copy-command").addEventListener("click", () => copy(byId("command").textContent, byId("copy-command")));
byId("sign-in").addEventListener("click", () => (visitor ? signOut() : leave()));

async function copy(text, button) {
  const said = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Select the text and copy it";
  }
  setTimeout(() => (button.textContent = said), 2000);
}

async function leave() {
  try {
    await signIn(built.hub, form());
  } catch (error) {
    complain(error.message);
  }
}

function signOut() {
  visitor = null;
  followed?.stop();
  location.replace(location.origin + location.pathname);
}

byId("start").addEventListener("click", async () => {
  if (!visitor) return leave();
  byId("start").disabled = true;
  byId("problem").replaceChildren();
  try {
    const asked = words();
    const target = byId("target").value.trim() || shown.target;
    const job = await jobs().start(jobCommand(location.href, built.wheel, asked, shown.runs_model), shown.machine, shown.seconds, target);
    follow(job);
    byId("job").focus();
  } catch (error) {
    complain(error.message);
  } finally {
    byId("start").disabled = false;
  }
});

// Jobs

function jobs() {
  return new Jobs(hub(), visitor.name);
}

async function showRunning() {
  const found = await jobs().running();
  byId("running").hidden = found.length === 0;
  byId("jobs").replaceChildren(
    ...found.map((job) => {
      const item = document.createElement("li");
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = `Follow ${targetOf(job) || job.id}`;
      button.addEventListener("click", () => {
        follow(job);
        byId("job").focus();
      });
      item.append(button);
      return item;
    }),
  );
  if (found.length === 1) follow(found[0]);
}

// Show a job until it ends or another one is shown.
function follow(job) {
  followed?.stop();
  const stopping = new AbortController();
  const lines = [];
  followed = { job, stop: () => stopping.abort(), log: () => lines.join("\n") };
  byId("log").textContent = "";
  byId("done").replaceChildren();
  byId("bar").value = 0;
  byId("again").hidden = true;
  byId("cancel").hidden = false;
  byId("job").hidden = false;
  byId("job-title").textContent = `Job for ${targetOf(job) || job.id}`;
  showStage(job);
  readLog(job, lines, stopping.signal);
  watch(job, lines, stopping.signal);
}

function showStage({ status, durations }) {
  const stages = { SCHEDULING: "waiting for a machine", RUNNING: "running", COMPLETED: "finished", CANCELED: "cancelled", ERROR: "failed", DELETED: "deleted" };
  const seconds = durations?.runningSecs;
  const reason = typeof status?.message === "string" && status.message ? `: ${status.message}` : "";
  byId("stage").textContent = `The job is ${stages[status?.stage] ?? "in an unknown state"}${reason}.${seconds ? ` It has run ${spoken(seconds)}.` : ""}`;
}

async function readLog(job, lines, signal) {
  let heard = 0;
  while (!signal.aborted && !followed.ended) {
    // The stream begins anew with the first line.
    let number = 0;
    try {
      await jobs().log(job.id, (line, time) => {
        if (signal.aborted || ++number <= heard) return;
        heard = number;
        tell(lines, line, time);
      }, signal);
    } catch {
      // A log that does not come is no reason to stop watching.
    }
    await pause(BETWEEN_LOOKS);
  }
}

function tell(lines, line, time) {
  lines.push(line);
  if (lines.length > MOST_LINES) lines.shift();
  const log = byId("log");
  const atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
  log.append(`${line}\n`);
  if (log.childNodes.length > MOST_LINES) log.firstChild.remove();
  if (atEnd) log.scrollTop = log.scrollHeight;
  const share = /(\d+) % (is already )?converted/.exec(line);
  if (share) advance(Number(share[1]), time);
}

// Show how much is converted, and how long the rest takes at the speed so far.
function advance(share, time) {
  byId("bar").value = share;
  const { began } = followed;
  if (!began) followed.began = { share, time };
  else if (share > began.share && time > began.time) {
    const left = ((time - began.time) / 1000 / (share - began.share)) * (100 - share);
    byId("done").textContent = `${share} % converted, about ${spoken(left)} left.`;
  }
}

async function watch(job, lines, signal) {
  const mine = followed;
  while (!signal.aborted) {
    try {
      const now = await jobs().status(job.id);
      if (signal.aborted) return;
      showStage(now);
      if (ENDED.includes(now.status?.stage)) return await end(mine, now, lines, signal);
    } catch (error) {
      if (error.status === 401) return complain("Your sign-in has ended. The job goes on as long as its token is good; sign in again to follow it.");
    }
    await pause(BETWEEN_LOOKS);
  }
}

async function end(mine, job, lines, signal) {
  // The last lines of the log come a little later.
  await pause(BETWEEN_LOOKS);
  if (signal.aborted) return;
  mine.ended = true;
  byId("cancel").hidden = true;
  byId("again").hidden = job.status.stage === "COMPLETED";
  const target = targetOf(job).includes("/") ? targetOf(job) : `${visitor.name}/${targetOf(job)}`;
  if (job.status.stage === "COMPLETED") {
    byId("bar").value = 100;
    const link = document.createElement("a");
    link.href = `${built.hub}/${path(target)}`;
    link.textContent = target;
    link.target = "_blank";
    link.rel = "noopener";
    byId("done").replaceChildren("The model is in ", link, ".");
  } else {
    byId("done").textContent = "Nothing of it is on the main branch. Started again, it begins anew, but uploads nothing that the Hub still has.";
  }
}

function pause(milliseconds) {
  return new Promise((resolve) => setTimeout(resolve, milliseconds));
}

byId("cancel").addEventListener("click", async () => {
  byId("cancel").disabled = true;
  try {
    await jobs().cancel(followed.job.id);
  } catch (error) {
    complain(error.message);
  } finally {
    byId("cancel").disabled = false;
  }
});

byId("again").addEventListener("click", async () => {
  const { job } = followed;
  byId("again").disabled = true;
  try {
    follow(await jobs().start(job.command, { name: job.flavor }, secondsOf(job), targetOf(job)));
  } catch (error) {
    complain(error.message);
  } finally {
    byId("again").disabled = false;
  }
});

byId("copy-log").addEventListener("click", () => copy(followed.log(), byId("copy-log")));

// The beginning: until now nothing listened to the buttons, so index.html offers none.

async function greet() {
  byId("show").disabled = false;
  let back = null;
  try {
    back = await signedIn(built.hub);
    if (back !== null) {
      visitor = { token: back.token, expires: back.expires, name: "" };
      const { name } = await hub().json("/api/whoami-v2");
      visitor.name = name;
      byId("sign-in").textContent = `Sign out ${name}`;
    }
  } catch (error) {
    visitor = null;
    complain(error instanceof SignInError ? error.message : `You are not signed in. ${error.message}`);
  }
  byId("sign-in").hidden = !canSignIn();
  if (visitor) showRunning().catch((error) => complain(error.message));
  try {
    offer(await ask({ kind: "choices" }));
  } catch (error) {
    return complain(error.message);
  } finally {
    say("");
  }
  if (back?.form?.repo) {
    fill(back.form);
    await showPlan();
  }
}

await greet();
