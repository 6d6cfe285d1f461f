// Sign-in with Hugging Face: OAuth with PKCE, by redirect (RFC 7636). The token is a value in memory: it is in no
// address, and nothing stores it. What must outlast the redirect is the verifier and the state, which are removed from
// the tab's session as soon as the visitor is back.

const KEPT = "openquant-sign-in";

export class SignInError extends Error {}

// Whether this page has an OAuth app. A static Space sets these variables from the metadata in its README.
export function canSignIn() {
  return Boolean(variables().OAUTH_CLIENT_ID);
}

function variables() {
  return window.huggingface?.variables ?? {};
}

function random() {
  return encode(crypto.getRandomValues(new Uint8Array(32)));
}

function encode(bytes) {
  return btoa(String.fromCharCode(...bytes)).replace(/\+/g, "-").replace(/\//g, "_").replace(/=/g, "");
}

function here() {
  return location.origin + location.pathname;
}

// Leave for the Hub. `form` is what the visitor had typed. Within another page's frame the Hub shows no sign-in, so
// this page is opened on its own.
export async function signIn(hub, form) {
  if (window.top !== window.self) {
    window.open(here(), "_blank", "noopener");
    return;
  }
  const verifier = random();
  const state = random();
  const hashed = new Uint8Array(await crypto.subtle.digest("SHA-256", new TextEncoder().encode(verifier)));
  sessionStorage.setItem(KEPT, JSON.stringify({ state, verifier, form }));
  const asked = new URLSearchParams({
    client_id: variables().OAUTH_CLIENT_ID,
    redirect_uri: here(),
    response_type: "code",
    scope: variables().OAUTH_SCOPES ?? "openid profile contribute-repos write-repos jobs",
    state,
    code_challenge: encode(hashed),
    code_challenge_method: "S256",
  });
  location.assign(`${hub}/oauth/authorize?${asked}`);
}

// Finish a sign-in, if the visitor comes back from one: {token, expires (ms), form}; null if this is another visit.
export async function signedIn(hub) {
  const given = new URLSearchParams(location.search);
  let kept = null;
  try {
    kept = JSON.parse(sessionStorage.getItem(KEPT));
    sessionStorage.removeItem(KEPT);
  } catch {
    // In a frame a browser may allow no storage. No sign-in begins there.
  }
  if (!given.has("state")) return null;
  // The code is good for one use, and needs the verifier. Still, it is nothing to bookmark.
  history.replaceState(null, "", here());
  if (kept === null || given.get("state") !== kept.state) {
    throw new SignInError("This sign-in was not begun here, or in another tab. Please sign in again.");
  }
  if (!given.has("code")) throw new SignInError("Hugging Face did not sign you in.");
  const asked = Date.now();
  let answer;
  try {
    answer = await fetch(`${hub}/oauth/token`, {
      method: "POST",
      credentials: "omit",
      referrerPolicy: "no-referrer",
      body: new URLSearchParams({
        grant_type: "authorization_code",
        code: given.get("code"),
        redirect_uri: here(),
        client_id: variables().OAUTH_CLIENT_ID,
        code_verifier: kept.verifier,
      }),
    });
  } catch {
    throw new SignInError("Hugging Face cannot be reached. Please sign in again.");
  }
  const found = answer.ok ? await answer.json().catch(() => null) : null;
  if (typeof found?.access_token !== "string") throw new SignInError("Hugging Face did not sign you in.");
  const expires = typeof found.expires_in === "number" ? asked + 1000 * found.expires_in : null;
  return { token: found.access_token, expires, form: kept.form };
}
