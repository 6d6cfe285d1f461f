"""The page, made with Gradio: model, goal, run, result."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gradio as gr

from ..errors import OpenQuantError, SourceError, UsageError
from ..fit.budget import read_budget
from ..formats.names import SCHEME_NAMES
from ..options import FitOptions, Option, flags_of
from .choices import ADVANCED, Chosen, Roots, is_local, push_words
from .running import result_html, run_title, status_html
from .runs import DONE, FAILED, STOPPED, PageRun, Runs, environment, without_tokens
from .server import OWNER
from .view import problem_html

# Names that the search shows, and characters from which on it searches.
MOST_FOUND, FEWEST_LETTERS = 8, 2
PLAN_SECONDS = 300
# Plans that are made at one time, each in a process of its own.
PLANS = 2
# Bytes of a card that are shown.
MOST_CARD = 1 << 18
HERE, THERE = (
    "Keep the output here",
    "Straight into a repository on the Hub (each shard is deleted here once it is there)",
)
ONE, MIXED = "One scheme", "A mixture of schemes that fills a size"
INTRODUCTION = (
    "<h1>openquant</h1><p>Turns a model into a smaller checkpoint that vLLM and SGLang load. "
    "It runs on this machine. Nothing is sent to anybody but the Hub.</p>"
)
# The choice of a scheme that the GPU decides.
BEST = ""


class Page:
    """What the page does when somebody types or clicks.

    Args:
        runs: the queue of runs.
        roots: directories that may be read.

    Attributes:
        tokens: the token of each browser that typed one.
    """

    def __init__(self, runs: Runs, roots: Roots) -> None:
        self.runs, self.roots = runs, roots
        self.tokens: dict[str, str] = {}
        self._planning = threading.BoundedSemaphore(PLANS)

    def search(self, text: str, request: gr.Request) -> Any:
        """Find repositories on the Hub whose names have a text in them."""
        text = text.strip()
        names = [] if is_local(text) or len(text) < FEWEST_LETTERS else find_names(text, self._token(request))
        return gr.update(choices=names, value=None, visible=bool(names))

    def use_token(self, text: str, request: gr.Request) -> tuple[str, str]:
        """Keep a token in memory for this browser, or forget it; the field is emptied."""
        text = text.strip()
        if text and not (text.isascii() and text.isprintable() and " " not in text and len(text) <= 200):
            return "", problem_html(UsageError("this is no token", "copy it from huggingface.co/settings/tokens"))
        if text:
            self.tokens[owner_of(request)] = text
            return "", "<p>Your token is used. It is kept in memory, for this browser alone, until the server ends.</p>"
        self.tokens.pop(owner_of(request), None)
        return "", "<p>No token of yours is used.</p>"

    def plan(self, request: gr.Request, *values: Any) -> str:
        """Plan what is chosen now: the sections."""
        try:
            choice = choice_of(*values)
            found = self._planned(choice, values[GPU], self._token(request))
        except OpenQuantError as problem:
            return problem_html(problem)
        return str(found["html"])

    def convert(self, request: gr.Request, *values: Any) -> tuple[Any, ...]:
        """Put a run into the queue, once its plan has no error."""
        try:
            choice, token = choice_of(*values), self._token(request)
            if choice.fit:
                # A mixture is planned when it is measured; its options are checked now.
                read_budget(choice.fit)
                given = choice.keywords(self.roots)
                FitOptions.parse(**{name: given[name] for name in ("fit", "engines", "candidates") if name in given})
            found = self._planned(choice, values[GPU], token)
            if found["refused"]:
                return found["html"], gr.skip()
            if not choice.fit and not choice.scheme:
                choice = choice_of(*values, scheme=found["scheme"])
            run = self.runs.add(owner_of(request), choice.model, choice.steps(self.roots), token, found["shards"])
        except OpenQuantError as problem:
            return problem_html(problem), gr.skip()
        return "", run.id

    def refresh(self, selected: str | None, seen: Mapping[str, str], request: gr.Request) -> tuple[Any, ...]:
        """Show the runs of this browser, and the selected one. Parts that are as they were are left alone."""
        owned = self.runs.of(owner_of(request))
        run = next((run for run in owned if run.id == selected), owned[0] if owned else None)
        parts: dict[str, Any] = {"runs": [(run_title(one), one.id) for one in owned], "selected": run and run.id}
        if run is not None:
            status = self.runs.status(run)
            parts |= {"status": status_html(status), "log": status.log, "state": run.state}
            parts |= {"result": self._result(run) if run.state == DONE else ""}
        new = {name: digest(value) for name, value in parts.items()}

        def changed(name: str) -> bool:
            return new.get(name) != seen.get(name)

        done, output = run is not None and run.state == DONE, run is not None and bool(run.output)
        ended = run is not None and run.state in (DONE, FAILED, STOPPED)
        remove = "Remove from the list" if done else "Cancel, and remove what it wrote"
        buttons = changed("state") or changed("selected")
        return (
            gr.update(choices=parts["runs"], value=parts["selected"], visible=bool(owned))
            if changed("runs") or changed("selected")
            else gr.skip(),
            parts.get("status", "<p>No run yet.</p>") if changed("status") or not seen else gr.skip(),
            gr.update(value=parts.get("log", ""), visible=run is not None) if changed("log") or buttons else gr.skip(),
            gr.update(value=remove, visible=run is not None) if buttons or not seen else gr.skip(),
            gr.update(visible=ended and not done) if buttons or not seen else gr.skip(),
            parts.get("result", "") if changed("result") else gr.skip(),
            gr.update(visible=output) if buttons or changed("result") or not seen else gr.skip(),
            parts["selected"],
            new,
        )

    def remove(self, displayed: str | None, request: gr.Request) -> None:
        """Cancel a run, or take it off the list."""
        run = self.runs.find(owner_of(request), displayed)
        if run is not None:
            self.runs.remove(run)

    def proceed(self, displayed: str | None, request: gr.Request) -> str:
        """Continue a run that was stopped."""
        run = self.runs.find(owner_of(request), displayed)
        try:
            if run is not None:
                self.runs.proceed(run, self._token(request))
        except OpenQuantError as problem:
            return problem_html(problem)
        return ""

    def publish(
        self, displayed: str | None, name: str, private: bool, create_pr: bool, request: gr.Request
    ) -> tuple[Any, ...]:
        """Put a run into the queue that publishes a finished output."""
        owner = owner_of(request)
        run = self.runs.find(owner, displayed)
        if run is None or not run.output:
            return problem_html(UsageError("there is no output to publish", "convert a model first")), gr.skip()
        try:
            words = push_words(Path(run.output), name.strip(), private, create_pr)
            added = self.runs.add(owner, Path(run.output).name, [words], self._token(request))
        except OpenQuantError as problem:
            return problem_html(problem), gr.skip()
        return "", added.id

    def _token(self, request: gr.Request) -> str | None:
        return self.tokens.get(owner_of(request))

    def _planned(self, choice: Chosen, gpu: str, token: str | None) -> dict[str, Any]:
        """Plan in a process of its own, which has the token."""
        given = choice.keywords(self.roots)
        shared = ("model", "kv_cache", "quantize_lm_head", "quantize_embeddings", "ignore", "revision")
        fit = {name: given[name] for name in shared if name in given}
        fit |= {"gpu": gpu} if gpu else {}
        fit |= {"context": choice.context} if choice.context else {}
        asked = json.dumps({"compress": None if choice.fit else given, "fit": fit})
        command = [sys.executable, "-m", "openquant.web.planner"]
        try:
            with self._planning:
                done = subprocess.run(
                    command,
                    input=asked,
                    capture_output=True,
                    text=True,
                    cwd=self.runs.folder,
                    env=environment(token),
                    timeout=PLAN_SECONDS,
                )
        except subprocess.TimeoutExpired:
            raise SourceError("the plan took too long", "try again, or plan on the command line") from None
        try:
            found: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            last = without_tokens(done.stderr.strip().rpartition("\n")[2])
            raise SourceError(f"the plan failed: {last}", "this is a mistake of openquant; please report it") from None
        return found

    def _result(self, run: PageRun) -> str:
        found = self.runs.result(run, 0)
        card = ""
        if run.output:
            try:
                with (Path(run.output) / "README.md").open("rb") as file:
                    card = file.read(MOST_CARD).decode("utf-8", "replace")
            except OSError:
                card = ""
        pushed = str(found.get("pushed_to") or "")
        return result_html(run, found, card, pushed, self.runs.report(run) is not None)


def owner_of(request: gr.Request) -> str:
    """Return the digest that stands for the browser of a request, which the guard gives."""
    return str(request.headers[OWNER])


def digest(value: Any) -> str:
    """Return a digest of a value, by which a later one is told from it."""
    return hashlib.sha256(repr(value).encode()).hexdigest()


def find_names(text: str, token: str | None) -> list[str]:
    """Return the names of repositories on the Hub that have a text in them; none if the Hub does not answer.

    Args:
        text: a part of a name.
        token: a token that was typed; None for the login of this machine.
    """
    from huggingface_hub import HfApi

    try:
        found = [str(model.id) for model in HfApi(token=token).list_models(search=text, limit=MOST_FOUND)]
    except Exception:
        # A search is a convenience: a name can be typed whole.
        return []
    return [name for name in found if name.isprintable() and len(name) <= 200]


# The values of the form, in the order of its fields.
MODEL, KIND, SCHEME, SIZE, GPU, CONTEXT, GPTQ, EVALUATE, WHERE, NAME, PRIVATE, REQUEST = range(12)


def choice_of(*values: Any, scheme: str | None = None) -> Chosen:
    """Make a Chosen of the values of the form.

    Args:
        values: by the constants above, then those of ADVANCED in its order.
        scheme: a scheme instead of the form's.

    Raises:
        UsageError: a value is not allowed.
    """
    texts = [value.strip() if isinstance(value, str) else value for value in values]
    advanced = {
        name: ("1" if value else "") if option.value is None else str(value or "")
        for (name, option), value in zip(ADVANCED.items(), texts[REQUEST + 1 :], strict=True)
    }
    mixed, there = texts[KIND] == MIXED, texts[WHERE] == THERE
    if mixed and not (texts[SIZE] or texts[GPU]):
        raise UsageError("no size is named", "name a GPU, or a size such as size=20GB, 5.0bits or kl=0.02")
    if there and not texts[NAME]:
        raise UsageError("no repository is named", "name the repository that the output goes to")
    return Chosen(
        model=texts[MODEL] or "",
        scheme=scheme if scheme is not None else texts[SCHEME] or "",
        fit=(texts[SIZE] or texts[GPU]) if mixed else "",
        context=texts[CONTEXT] or "",
        gptq=bool(texts[GPTQ]),
        push=texts[NAME] if there else "",
        private=there and bool(texts[PRIVATE]),
        create_pr=there and bool(texts[REQUEST]),
        evaluate=bool(texts[EVALUATE]),
        advanced={name: value for name, value in advanced.items() if value},
    )


def option_field(name: str, option: Option) -> Any:
    """Make the field of an option behind the fold, from what `--help` says of it.

    Args:
        name: name of the option's field.
        option: the option.
    """
    about = {"label": flags_of(name, option)[-1], "info": option.summary}
    if option.value is None:
        return gr.Checkbox(**about)
    if option.choices is not None:
        return gr.Dropdown([("default", ""), *((choice, choice) for choice in option.choices)], value="", **about)
    return gr.Textbox(**about, lines=3 if option.repeated else 1, placeholder=option.value)


def build(page: Page) -> gr.Blocks:
    """Lay the page out.

    Args:
        page: what it does.

    Returns:
        The page, to be mounted.
    """
    # A request and its answer each. Gradio's queue shares one stream of answers among all events of a page, and loses
    # the answer of an event that joins in the moment in which the stream ends; a timer that waits for one stands still.
    hidden: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden", "queue": False}
    shown: dict[str, Any] = {**hidden, "show_progress": "minimal"}
    with gr.Blocks(title="openquant", analytics_enabled=False) as blocks:
        gr.HTML(INTRODUCTION)
        selected, displayed = gr.State(), gr.State()
        # Kept by the page, so that it is of what the page shows, also if two answers overtake each other.
        seen = gr.JSON({}, visible=False)
        with gr.Column(elem_id="model-section"):
            gr.HTML("<h2>1. Model</h2>")
            model = gr.Textbox(
                label="Model",
                info="A repository on the Hub, such as Qwen/Qwen3-8B, or a directory that begins with / or ./",
                elem_id="model",
            )
            matches = gr.Radio([], label="Repositories on the Hub", visible=False, elem_id="matches")
            with gr.Accordion("Token of the Hub", open=False):
                gr.HTML(
                    "<p>Only private models and publishing need one. Without one typed here, the login of this machine "
                    "is used (<code>hf auth login</code>, HF_TOKEN).</p>"
                )
                token = gr.Textbox(label="Token", type="password", max_length=200, elem_id="token")
                use = gr.Button("Use this token")
                told = gr.HTML(elem_id="token-state")
        with gr.Column(elem_id="goal-section"):
            gr.HTML("<h2>2. Goal</h2>")
            with gr.Row():
                gpu = gr.Textbox(label="GPU", info="4090, 2xA100-80, 24GB or cpu", elem_id="gpu")
                context = gr.Textbox(label="Context", info="Tokens, such as 8192 or 32k", elem_id="context")
            kind = gr.Radio([ONE, MIXED], value=ONE, label="Schemes", elem_id="kind")
            scheme = gr.Dropdown(
                [
                    ("the best that fits the GPU", BEST),
                    *((f"{name}: {SCHEME_NAMES[name].stored}", name) for name in SCHEME_NAMES),
                ],
                value=BEST,
                label="Scheme",
                elem_id="scheme",
            )
            size = gr.Textbox(
                label="Size", info="size=20GB, 5.0bits or kl=0.02; empty: the GPU above", visible=False, elem_id="size"
            )
            gptq = gr.Checkbox(label="Calibrate with GPTQ", info="Loses less, and takes longer", elem_id="gptq")
            evaluate = gr.Checkbox(
                label="Measure what is lost", info="Compares the output with its source at the end", elem_id="evaluate"
            )
            where = gr.Radio([HERE, THERE], value=HERE, label="Output", elem_id="where")
            with gr.Column(visible=False) as target:
                name = gr.Textbox(label="Repository", info="you/Qwen3-8B-INT4", elem_id="name")
                private = gr.Checkbox(label="Private, if it is created", elem_id="private")
                request = gr.Checkbox(label="As a pull request", elem_id="recipes")
            with gr.Accordion("Advanced options", open=False, elem_id="advanced"):
                fields = [option_field(one, option) for one, option in ADVANCED.items()]
            plan = gr.Button("Plan", elem_id="plan")
            sections = gr.HTML(elem_id="plan-sections", min_height=10)
            convert = gr.Button("Convert", variant="primary", elem_id="convert")
            problem = gr.HTML(elem_id="problem")
        with gr.Column(elem_id="run-section"):
            gr.HTML("<h2>3. Run</h2>")
            runs = gr.Radio([], label="Your runs", visible=False, elem_id="runs")
            status = gr.HTML(elem_id="status")
            with gr.Row():
                proceed = gr.Button("Continue", visible=False, elem_id="proceed")
                remove = gr.Button("Cancel, and remove what it wrote", visible=False, variant="stop", elem_id="remove")
            log = gr.Textbox(
                label="Log", lines=8, max_lines=20, interactive=False, buttons=["copy"], visible=False, elem_id="log"
            )
        with gr.Column(elem_id="result-section"):
            gr.HTML("<h2>4. Result</h2>")
            result = gr.HTML(elem_id="result")
            with gr.Column(visible=False) as publishing:
                to = gr.Textbox(label="Publish in the repository", info="you/Qwen3-8B-INT4", elem_id="publish-name")
                to_private = gr.Checkbox(label="Private, if it is created", elem_id="publish-private")
                to_request = gr.Checkbox(label="As a pull request", elem_id="publish-request")
                publish = gr.Button("Publish", elem_id="publish")
        timer = gr.Timer(1)

        form = [model, kind, scheme, size, gpu, context, gptq, evaluate, where, name, private, request, *fields]
        model.input(page.search, [model], [matches], trigger_mode="always_last", **hidden)
        kind.change(
            lambda chosen: (gr.update(visible=chosen == ONE), gr.update(visible=chosen == MIXED)),
            [kind],
            [scheme, size],
            **hidden,
        )
        where.change(lambda chosen: gr.update(visible=chosen == THERE), [where], [target], **hidden)
        use.click(page.use_token, [token], [token, told], **hidden)
        chosen = matches.select(lambda found: (found, gr.update(visible=False)), [matches], [model, matches], **hidden)
        plans = {"fn": page.plan, "inputs": form, "outputs": sections}
        chosen.then(**plans, **shown)
        gr.on([model.submit, gpu.submit, context.submit, plan.click], **plans, **shown)
        refreshed = [runs, status, log, remove, proceed, result, publishing, displayed, seen]
        refresh = {"fn": page.refresh, "inputs": [selected, seen], "outputs": refreshed}
        convert.click(page.convert, form, [problem, selected], **shown).then(**refresh, **hidden)
        publish.click(page.publish, [displayed, to, to_private, to_request], [problem, selected], **hidden)
        remove.click(page.remove, [displayed], None, **hidden).then(**refresh, **hidden)
        proceed.click(page.proceed, [displayed], [problem], **hidden)
        runs.select(lambda found: found, [runs], [selected], **hidden).then(**refresh, **hidden)
        timer.tick(**refresh, **hidden)
        blocks.load(**refresh, **hidden)
    return blocks
