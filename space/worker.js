// Runs the planner (planner.py) in Pyodide, away from the page, which stays alive meanwhile. It fetches config and
// headers of a repository; nothing else is requested. The visitor's token, if there is one, comes with each request.

import { loadPyodide } from "./pyodide/pyodide.mjs";
import { Hub } from "./hub.js";

// Requests for headers at a time, and the bytes of the first one, which most headers fit in.
const AT_ONCE = 8;
const FIRST_PART = 1 << 17;
// A header that claims to be longer is refused by the planner, which is given no more.
const MOST_HEADER = 100e6;
const SMALL = ["config.json", "model.safetensors.index.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json"];
const MOST_SMALL = { "model.safetensors.index.json": 256e6 };

const MODULES = ["planner.py", "without_numpy.py"];

const started = start();

async function start() {
  const { wheel, bytes: total } = await (await fetch("./build.json")).json();
  const uncounted = self.fetch;
  self.fetch = counted(uncounted, total);
  const [python, archive, ...modules] = await Promise.all([
    loadPyodide({ indexURL: new URL("./pyodide/", import.meta.url).href }),
    bytes(`./${wheel}`),
    ...MODULES.map((name) => bytes(`./${name}`)),
  ]);
  self.fetch = uncounted;
  python.FS.writeFile("/openquant.whl", archive);
  python.FS.mkdir("/page");
  MODULES.forEach((name, number) => python.FS.writeFile(`/page/${name}`, modules[number]));
  python.runPython("import sys; sys.path[:0] = ['/page', '/openquant.whl']; import without_numpy; from planner import *; from pathlib import Path");
  return { python, choices: JSON.parse(python.globals.get("choices")()) };
}

// A fetch that tells the page how much has arrived, Pyodide's files included.
function counted(uncounted, total) {
  let loaded = 0;
  const counter = () => new TransformStream({
    transform(part, stream) {
      loaded += part.length;
      postMessage({ loaded, total });
      stream.enqueue(part);
    },
  });
  return async (...request) => {
    const answer = await uncounted(...request);
    return answer.ok ? new Response(answer.body.pipeThrough(counter()), answer) : answer;
  };
}

async function bytes(address) {
  const answer = await fetch(address);
  if (!answer.ok) throw new Error(`${address} cannot be loaded: ${answer.status}`);
  return new Uint8Array(await answer.arrayBuffer());
}

async function openRepository(python, hub, { repo, revision }, say) {
  say("Looking at the repository");
  const { commit, files } = await hub.files(repo, revision);
  python.runPython("import shutil; shutil.rmtree('/model', ignore_errors=True); Path('/model').mkdir()");
  const names = Object.keys(files);
  for (const name of SMALL.filter((name) => name in files)) {
    if (files[name][0] > (MOST_SMALL[name] ?? 32e6)) continue;
    python.FS.writeFile(`/model/${name}`, await hub.read(repo, commit, name));
  }
  const index = SMALL[1] in files ? python.FS.readFile(`/model/${SMALL[1]}`) : undefined;
  const shards = JSON.parse(call(python, "needed_shards", names, index));
  const heads = {};
  let waiting = 0;
  const one = async () => {
    while (waiting < shards.length) {
      const name = shards[waiting++];
      heads[name] = await head(hub, repo, commit, name, files[name][0]);
      say(`Read the headers of ${Object.keys(heads).length} of ${shards.length} files`);
    }
  };
  await Promise.all(Array.from({ length: Math.min(AT_ONCE, shards.length) }, one));
  const more = (name, offset, length) => hub.readNow(repo, commit, name, offset, length);
  const found = { repo, commit, files };
  python.globals.set("_more", more);
  python.globals.set("_heads", python.toPy(heads));
  python.globals.set("_found", python.toPy(found));
  python.runPython(
    "open_repository(_found, Path('/model'), {name: bytes(data) for name, data in _heads.items()}, " +
      "lambda *where: bytes(_more(*where).to_py()))",
  );
  return commit;
}

async function head(hub, repo, commit, name, size) {
  const first = await hub.read(repo, commit, name, 0, Math.min(FIRST_PART, size));
  if (first.length < 8) return first;
  const length = 8 + Number(new DataView(first.buffer, first.byteOffset).getBigUint64(0, true));
  if (length <= first.length || length > Math.min(size, MOST_HEADER)) return first;
  const rest = await hub.read(repo, commit, name, first.length, length - first.length);
  const whole = new Uint8Array(first.length + rest.length);
  whole.set(first);
  whole.set(rest, first.length);
  return whole;
}

function call(python, name, ...given) {
  const words = given.map((value) => (value === undefined ? null : python.toPy(value)));
  return python.globals.get(name)(...words);
}

// The text of a Python error says nothing to a visitor; problem() makes HTML of the exception itself.
function problem(python, error) {
  if (!(error instanceof python.ffi.PythonError)) return null;
  return python.runPython("problem(sys.last_exc if hasattr(sys, 'last_exc') else sys.last_value)");
}

let opened = "";

async function plan(asked, say) {
  say("Starting the planner");
  const { python } = await started;
  const hub = new Hub(asked.hub, asked.token);
  const key = JSON.stringify([asked.repo, asked.revision]);
  try {
    if (opened !== key) {
      opened = "";
      await openRepository(python, hub, asked, say);
      opened = key;
    }
    say("Planning");
    const { gpu, context, scheme, options, target } = asked;
    return { ...JSON.parse(call(python, "planned", { gpu, context, scheme, options, target })), read: hub.bytes };
  } catch (error) {
    const html = problem(python, error);
    if (html === null) throw error;
    return { problem: html };
  }
}

// One request after the other: the planner holds one repository.
let last = Promise.resolve();

onmessage = ({ data }) => {
  last = last.then(async () => {
    const say = (progress) => postMessage({ id: data.id, progress });
    try {
      const answer = data.kind === "choices" ? (await started).choices : await plan(data, say);
      postMessage({ id: data.id, answer });
    } catch (error) {
      postMessage({ id: data.id, failed: { message: error.message, status: error.status ?? 0 } });
    }
  });
};
