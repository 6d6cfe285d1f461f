// Requests to the Hub. The token is sent to the Hub alone: where the Hub redirects a file to its storage, the browser
// leaves the Authorization header out.

export class HubError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export class Hub {
  // `address` is https://huggingface.co; `token` is a visitor's or "".
  constructor(address, token = "") {
    this.address = address;
    this.token = token;
    this.bytes = 0;
  }

  async request(path, { method = "GET", json, headers = {}, signal } = {}) {
    const sent = { ...headers };
    if (this.token) sent.Authorization = `Bearer ${this.token}`;
    if (json !== undefined) sent["Content-Type"] = "application/json";
    let answer;
    try {
      answer = await fetch(this.address + path, {
        method, headers: sent, signal, credentials: "omit", referrerPolicy: "no-referrer",
        body: json === undefined ? undefined : JSON.stringify(json),
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw this.unreachable();
    }
    if (!answer.ok) throw new HubError(await reason(answer, this.token), answer.status);
    return answer;
  }

  unreachable() {
    return new HubError(`${new URL(this.address).host} cannot be reached. Check the connection and try again.`, 0);
  }

  async json(path, given) {
    try {
      return await (await this.request(path, given)).json();
    } catch (error) {
      if (error instanceof SyntaxError) throw new HubError("The Hub's answer cannot be read.", 0);
      throw error;
    }
  }

  // The commit of a revision, and [size, digest] of each file by its path.
  async files(repo, revision) {
    const found = await this.json(`/api/models/${path(repo)}/revision/${encodeURIComponent(revision || "main")}?blobs=true`);
    const files = {};
    for (const { rfilename, size, lfs, blobId } of found.siblings ?? []) {
      files[rfilename] = [size ?? 0, lfs?.sha256 ?? blobId ?? ""];
    }
    return { commit: found.sha, files };
  }

  async read(repo, commit, name, offset = 0, length = -1) {
    if (length === 0) return new Uint8Array();
    const headers = length < 0 ? {} : { Range: `bytes=${offset}-${offset + length - 1}` };
    const answer = await this.request(resolved(repo, commit, name), { headers });
    if (length >= 0 && answer.status !== 206) {
      await answer.body?.cancel();
      throw new HubError(`The Hub, or a proxy before it, sends no parts of files (${name}).`, answer.status);
    }
    const data = new Uint8Array(await answer.arrayBuffer());
    this.bytes += data.length;
    return data;
  }

  // The same, while the planner waits. Only for a worker.
  readNow(repo, commit, name, offset, length) {
    const request = new XMLHttpRequest();
    request.open("GET", this.address + resolved(repo, commit, name), false);
    request.responseType = "arraybuffer";
    request.setRequestHeader("Range", `bytes=${offset}-${offset + length - 1}`);
    if (this.token) request.setRequestHeader("Authorization", `Bearer ${this.token}`);
    try {
      request.send();
    } catch {
      throw this.unreachable();
    }
    if (request.status !== 206) throw new HubError(`${name} cannot be read`, request.status);
    this.bytes += length;
    return new Uint8Array(request.response);
  }
}

export function path(name) {
  return name.split("/").map(encodeURIComponent).join("/");
}

function resolved(repo, commit, name) {
  return `/${path(repo)}/resolve/${commit}/${path(name)}`;
}

// What an answer other than success means. The Hub's own words are shown where it has some.
async function reason(answer, token) {
  let told = answer.headers.get("X-Error-Message") ?? "";
  const body = await answer.text().catch(() => "");
  try {
    const { error, message } = JSON.parse(body);
    told = typeof error === "string" ? error : typeof message === "string" ? message : told;
  } catch {
    // Not JSON.
  }
  if (token) told = told.split(token).join("(your token)");
  told = told.slice(0, 300);
  if (answer.status === 401 || answer.status === 404) {
    return token
      ? `There is no such repository, or your sign-in does not let this page read it. ${told}`
      : `There is no such repository, or it is private or gated: sign in for those. ${told}`;
  }
  if (answer.status === 402) return `Jobs need credits on your account (huggingface.co/settings/billing). ${told}`;
  if (answer.status === 403) return `The Hub refuses this: your sign-in does not allow it. ${told}`;
  if (answer.status === 429) return `The Hub asks to wait: too many requests. Try again in a few minutes. ${told}`;
  return `The Hub answered ${answer.status}. ${told}`;
}
