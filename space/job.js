// Jobs on the visitor's account, by the Hub's Jobs API (huggingface_hub 2.4, hf_api.py: run_job, fetch_job_logs,
// list_jobs, cancel_job, list_jobs_hardware; _jobs_api.py: _create_job_spec).

import { path } from "./hub.js";

export const ENDED = ["COMPLETED", "CANCELED", "ERROR", "DELETED"];
// The image that `hf jobs uv run` uses.
const IMAGE = "ghcr.io/astral-sh/uv:python3.12-bookworm";
const LABEL = ["openquant", "convert"];
// The Hub stops a job after 30 minutes if it is told nothing. A forecast may be wrong by much.
const SHORTEST = 1800;
const MARGIN = 3;
// Runs of a job, the first one included.
const ATTEMPTS = 2;
// What a job costs if the Hub does not tell (huggingface.co/docs/hub/jobs-pricing).
const BASIC = { name: "cpu-basic", prettyName: "CPU Basic", cpu: "2 vCPU", ram: "16 GB", ephemeralStorage: "20 GB", unitCostUSD: 0.01 / 60, unitLabel: "minute" };

export class Jobs {
  constructor(hub, user) {
    this.hub = hub;
    this.address = `/api/jobs/${path(user)}`;
  }

  // Start a job; `token` is its secret HF_TOKEN and nothing else of it.
  async start(command, machine, seconds, target) {
    return this.hub.json(this.address, { method: "POST", json: spec(command, machine, seconds, target, this.hub.token) });
  }

  // The visitor's running conversions.
  async running() {
    const found = await this.hub.json(`${this.address}?stage=RUNNING&stage=SCHEDULING&label=${LABEL.join("%3D")}`);
    return Array.isArray(found) ? found.filter((job) => typeof job?.id === "string" && job.labels?.[LABEL[0]] === LABEL[1]) : [];
  }

  async status(id) {
    return this.hub.json(`${this.address}/${encodeURIComponent(id)}`);
  }

  async cancel(id) {
    await this.hub.request(`${this.address}/${encodeURIComponent(id)}/cancel`, { method: "POST" });
  }

  // Call `tell` with each line of the log from its beginning, and its time in milliseconds, until the stream ends.
  async log(id, tell, signal) {
    const answer = await this.hub.request(`${this.address}/${encodeURIComponent(id)}/logs`, { headers: { Accept: "text/event-stream" }, signal });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      const lines = (rest + (value ?? "")).split("\n");
      rest = done ? "" : lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const { text, time } = logged(line.slice(5));
        tell(text.split(this.hub.token).join("(your token)"), time);
      }
      if (done) return;
    }
  }
}

function logged(data) {
  try {
    const { data: text, timestamp } = JSON.parse(data);
    return { text: typeof text === "string" ? text : "", time: Date.parse(timestamp) };
  } catch {
    return { text: "", time: NaN };
  }
}

export function spec(command, machine, seconds, target, token) {
  return {
    command,
    arguments: [],
    environment: {},
    secrets: { HF_TOKEN: token },
    flavor: machine.name,
    timeoutSeconds: limit(seconds),
    attempts: ATTEMPTS,
    labels: { name: `openquant-${target.replace(/[^A-Za-z0-9_-]/g, "-")}`.slice(0, 100), [LABEL[0]]: LABEL[1], seconds: String(seconds) },
    dockerImage: IMAGE,
  };
}

export function limit(seconds) {
  return Math.max(SHORTEST, Math.ceil(MARGIN * seconds));
}

// The cheapest machine without an accelerator whose disk is large enough: {machine, disk: false if none is}.
export async function machineFor(hub, disk) {
  let machines;
  try {
    const found = await hub.json("/api/jobs/hardware");
    machines = found.filter((one) => !one.accelerator && typeof one.unitCostUSD === "number" && one.unitLabel === "minute");
  } catch {
    machines = [];
  }
  if (machines.length === 0) machines = [BASIC];
  machines.sort((one, other) => one.unitCostUSD - other.unitCostUSD);
  const enough = machines.find((one) => bytes(one.ephemeralStorage) >= disk);
  return { machine: enough ?? machines[0], enough: Boolean(enough) };
}

function bytes(text) {
  const found = /^([\d.]+) ?(GB|TB)$/.exec(text ?? "");
  return found ? Number(found[1]) * (found[2] === "TB" ? 1e12 : 1e9) : 0;
}

// The words of a job: openquant from the wheel of this page. Only what runs the model needs torch.
export function jobCommand(page, wheel, words, runsModel) {
  const packages = runsModel ? ["--torch-backend", "cpu"] : ["--overrides", new URL("overrides.txt", page).href];
  return ["uvx", "--from", new URL(wheel, page).href, "--with", "numba", ...packages, "openquant", ...words];
}

// How long a job was expected to take, by its label.
export function secondsOf(job) {
  return Number(job.labels?.seconds) || 0;
}

// The repository that a job writes, from its command.
export function targetOf(job) {
  const words = Array.isArray(job.command) ? job.command : [];
  const found = words.find((word) => typeof word === "string" && word.startsWith("--push-to-hub="));
  return found ? found.slice("--push-to-hub=".length) : "";
}
