"""The page, made with Gradio: model, goal, run, result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr

from ..errors import OpenQuantError, UsageError
from ..fields import Option, flags_of
from ..files.cards import COMMANDS
from ..fit.budget import read_budget
from ..formats.hardware import SCHEME_NAMES
from ..options import FitOptions
from .choices import ADVANCED, Chosen, Roots, make_sections, push_words
from .runs import DONE, RUNNING, WAITING, Runs, result_html, run_title, status_html
from .view import problem_html

# Names that the search shows.
MOST_FOUND = 8
# The GPU of an untouched form.
USUAL_GPU = "RTX 4090"
HERE = "Here"
THERE = "Straight into a repository"
ONE = "One scheme"
MIXED = "A mixture"
INTRODUCTION = (
    "<h1>openquant</h1><p>Turns a model into a smaller checkpoint that vLLM and SGLang load, on this machine. "
    "Nothing is sent to anybody but the Hub.</p>"
)
# The choice of a scheme that the GPU decides.
BEST = ""
# A request and its answer each. Gradio's queue shares one stream of answers among all events of a page, and loses the
# answer of an event that joins in the moment in which the stream ends; a timer that waits for one stands still.
HIDDEN: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden", "queue": False}
SHOWN: dict[str, Any] = {**HIDDEN, "show_progress": "minimal"}
# What the browser does at once: an error is gone with the next action, and a busy button takes no second click.
BEGIN = "() => ['', {__type__: 'update', interactive: false}]"
END = "() => ({__type__: 'update', interactive: true})"
# Whoever clicks a row chooses its scheme.
CHOOSE = """element.addEventListener("click", ({target}) => {
  const scheme = target.closest("tr")?.querySelector("button");
  if (scheme) trigger("select", {value: scheme.value});
});"""


class Page:
    """What the page does when somebody types or clicks.

    Args:
        runs: the runs.
        roots: directories that may be read.
    """

    def __init__(self, runs: Runs, roots: Roots) -> None:
        self.runs = runs
        self.roots = roots

    def search(self, text: str) -> Any:
        """Find models here whose names have a text in them."""
        text = text.strip()
        names = [name for name in self.roots.models() if text.lower() in name.lower()][:MOST_FOUND]
        return gr.update(choices=names, value=None, visible=bool(names) and text not in names)

    def plan(self, *values: Any) -> tuple[Any, ...]:
        """Plan what is chosen now: what is wrong with it, and the sections."""
        try:
            found = self._make_plan(choice_of(*values), values[GPU])
        except OpenQuantError as problem:
            return problem_html(problem), gr.update(visible=False), ""
        return found["problem"], gr.update(visible=bool(found["html"]), open=True), found["html"]

    def convert(self, *values: Any) -> tuple[Any, ...]:
        """Put a run into the queue, once its plan has no error, and fold that."""
        try:
            choice = choice_of(*values)
            if choice.fit:
                self._check_mixture(choice)

            found = self._make_plan(choice, values[GPU])
            if found["problem"]:
                return found["problem"], gr.skip(), gr.skip()

            if not choice.fit and not choice.scheme:
                choice = choice_of(*values, scheme=found["scheme"])
            run = self.runs.add(choice.model, choice.steps(self.roots))
        except OpenQuantError as problem:
            return problem_html(problem), gr.skip(), gr.skip()
        return "", run.id, gr.update(open=False)

    def refresh(self, selected: str | None, seen: Sequence[str]) -> tuple[Any, ...]:
        """Show the runs, and the selected one. Parts that are as they were are left alone."""
        runs = self.runs.newest_first()
        run = next((run for run in runs if run.id == selected), next(iter(runs), None))
        if run is None:
            parts = [gr.update(visible=False)] * 2 + [gr.skip()] * 10
        else:
            is_done = run.state == DONE
            parts = [
                gr.update(visible=True),
                gr.update(visible=is_done),
                gr.update(choices=[(run_title(one), one.id) for one in runs], value=run.id),
                status_html(run),
                "\n".join(run.log),
                gr.update(visible=run.state in (WAITING, RUNNING)),
                problem_html(run.error) if run.error else "",
                result_html(run) if is_done else "",
                gr.update(visible=bool(run.output)),
                *(gr.update(value=command, visible=bool(command)) for command in run.serving),
                run.id,
            ]

        digests = [str(hash(repr(part))) for part in parts]
        before = seen or [""] * len(parts)
        changes = [gr.skip() if new == old else part for part, new, old in zip(parts, digests, before, strict=True)]
        return (*changes, digests)

    def stop(self, displayed: str | None) -> None:
        """End a run, or take it out of the queue."""
        run = self.runs.find(displayed)
        if run is not None:
            self.runs.stop(run)

    def publish(self, displayed: str | None, name: str, private: bool, create_pr: bool) -> tuple[Any, ...]:
        """Put a run into the queue that publishes a finished output."""
        run = self.runs.find(displayed)
        if run is None or not run.output:
            return problem_html(UsageError("there is no output to publish", "convert a model first")), gr.skip()

        output = Path(run.output)
        try:
            words = push_words(output, name.strip(), private, create_pr)
        except OpenQuantError as problem:
            return problem_html(problem), gr.skip()
        return "", self.runs.add(output.name, [words]).id

    def _check_mixture(self, choice: Chosen) -> None:
        """Check the options of a mixture, which is planned only when it is measured."""
        read_budget(choice.fit)
        given = choice.keywords(self.roots)
        FitOptions(**{name: given[name] for name in ("fit", "engines", "candidates") if name in given})

    def _make_plan(self, choice: Chosen, gpu: str) -> dict[str, str]:
        """Make the sections of a plan."""
        given = choice.keywords(self.roots)
        shared = ("model", "kv_cache", "quantize_lm_head", "quantize_embeddings", "ignore", "revision")
        fit = {name: given[name] for name in shared if name in given}
        if gpu:
            fit["gpu"] = gpu
        if choice.context:
            fit["context"] = choice.context

        return make_sections(None if choice.fit else given, fit)


def choose_row(event: gr.EventData) -> tuple[str, str]:
    """Return the kind and the scheme of a row in the table of schemes."""
    return ONE, event.value


# The values of the form, in the order of its fields.
MODEL, KIND, SCHEME, SIZE, GPU, CONTEXT, GPTQ, EVALUATE, WHERE, OUTPUT, NAME, PRIVATE, REQUEST = range(13)


def choice_of(*values: Any, scheme: str | None = None) -> Chosen:
    """Make a Chosen of the values of the form.

    Args:
        values: by the constants above, then those of ADVANCED in its order.
        scheme: a scheme instead of the form's.

    Raises:
        UsageError: a value is not allowed.
    """
    texts = [value.strip() if isinstance(value, str) else value for value in values]
    is_mixture = texts[KIND] == MIXED
    is_pushed = texts[WHERE] == THERE
    size = texts[SIZE] or texts[GPU]
    if is_mixture and not size:
        raise UsageError("no size is named", "name a GPU, or a size such as size=20GB, 5.0bits or kl=0.02")
    if is_pushed and not texts[NAME]:
        raise UsageError("no repository is named", "name the repository that the output goes to")

    if scheme is None:
        scheme = texts[SCHEME] or ""

    # Switches are booleans, and those that are off say nothing.
    fields = zip(ADVANCED, texts[REQUEST + 1 :], strict=True)
    advanced = {name: "1" if value is True else str(value) for name, value in fields if value}

    return Chosen(
        model=texts[MODEL] or "",
        scheme=scheme,
        fit=size if is_mixture else "",
        context=texts[CONTEXT] or "",
        gptq=bool(texts[GPTQ]),
        output=texts[OUTPUT] or "",
        push=texts[NAME] if is_pushed else "",
        private=is_pushed and bool(texts[PRIVATE]),
        create_pr=is_pushed and bool(texts[REQUEST]),
        evaluate=bool(texts[EVALUATE]),
        advanced=advanced,
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


class PageLayout:
    """The parts of the page from top to bottom. Make it inside of `gr.Blocks`."""

    def __init__(self) -> None:
        gr.HTML(INTRODUCTION)
        self.selected = gr.State()
        self.displayed = gr.State()
        # Kept by the page, so that it is of what the page shows, also if two answers overtake each other.
        self.seen = gr.JSON([], visible=False)

        self._lay_out_model()
        self._lay_out_goal()
        self.problem = gr.HTML(elem_id="problem")
        self._lay_out_run()
        self._lay_out_result()
        self.timer = gr.Timer(1)

    def _lay_out_model(self) -> None:
        """Make the fields that name a model."""
        with gr.Column(elem_id="model-section"):
            gr.HTML("<h2>1. Model</h2>")
            self.model = gr.Textbox(
                label="Model",
                info="A repository on the Hub, such as Qwen/Qwen3-8B, or a directory: its bare name, or / or ./ first",
                elem_id="model",
            )
            self.matches = gr.Radio([], label="Models here", visible=False, elem_id="matches")

    def _lay_out_goal(self) -> None:
        """Make the fields that say what is to become of it."""
        best = ("the best that fits the GPU", BEST)
        schemes = [(f"{name}: {about.stored}", name) for name, about in SCHEME_NAMES.items()]

        with gr.Column(elem_id="goal-section"):
            gr.HTML("<h2>2. Goal</h2>")
            with gr.Row():
                self.gpu = gr.Textbox(USUAL_GPU, label="GPU", info="4090, 2xA100-80, 24GB or cpu", elem_id="gpu")
                self.context = gr.Textbox(label="Context", info="Tokens, such as 8192 or 32k", elem_id="context")
            self.kind = gr.Radio([ONE, MIXED], value=ONE, label="Schemes (a mixture fills a size)", elem_id="kind")
            self.scheme = gr.Dropdown([best, *schemes], value=BEST, label="Scheme", elem_id="scheme")
            self.size = gr.Textbox(
                label="Size", info="size=20GB, 5.0bits or kl=0.02; empty: the GPU above", visible=False, elem_id="size"
            )
            self.gptq = gr.Checkbox(label="Calibrate with GPTQ: slower, loses less", elem_id="gptq")
            self.evaluate = gr.Checkbox(label="Measure what is lost at the end", elem_id="evaluate")

            self.where = gr.Radio([HERE, THERE], value=HERE, label="Output (straight: no copy here)", elem_id="where")
            self.output = gr.Textbox(
                label="Directory", info="Its name; empty: by the model and the scheme", elem_id="output"
            )
            with gr.Column(visible=False) as self.repository:
                self.name = gr.Textbox(label="Repository", info="you/Qwen3-8B-INT4", elem_id="name")
                self.private = gr.Checkbox(label="Private, if it is created", elem_id="private")
                self.request = gr.Checkbox(label="As a pull request", elem_id="request")

            with gr.Accordion("Advanced options", open=False, elem_id="advanced"):
                self.advanced = [option_field(name, option) for name, option in ADVANCED.items()]
            self.plan = gr.Button("Plan", elem_id="plan")
            with gr.Accordion("The plan", visible=False) as self.planned:
                self.sections = gr.HTML(elem_id="plan-sections", min_height=10, js_on_load=CHOOSE)
            self.convert = gr.Button("Convert", variant="primary", elem_id="convert")

    def _lay_out_run(self) -> None:
        """Make the list of runs, and what is known of the one that is selected."""
        with gr.Column(elem_id="run-section", visible=False) as self.run:
            gr.HTML("<h2>3. Run</h2>")
            self.runs = gr.Radio([], label="Your runs", elem_id="runs")
            self.status = gr.HTML(elem_id="status")
            self.stop = gr.Button("Stop", variant="stop", elem_id="stop")
            with gr.Accordion("Log", open=False):
                self.log = gr.Textbox(
                    show_label=False, lines=8, max_lines=20, interactive=False, buttons=["copy"], elem_id="log"
                )

    def _lay_out_result(self) -> None:
        """Make what shows a finished output, publishes it, and says how it is served."""
        with gr.Column(elem_id="result-section", visible=False) as self.done:
            gr.HTML("<h2>4. Result</h2>")
            with gr.Accordion("Publish on the Hub", open=False) as self.publishing:
                self.to = gr.Textbox(
                    label="Publish in the repository", info="you/Qwen3-8B-INT4", elem_id="publish-name"
                )
                self.to_private = gr.Checkbox(label="Private, if it is created", elem_id="publish-private")
                self.to_request = gr.Checkbox(label="As a pull request", elem_id="publish-request")
                self.publish = gr.Button("Publish", elem_id="publish")
            self.result = gr.HTML(elem_id="result")
            self.serving = [
                gr.Textbox(label=f"Serve with {name}", interactive=False, buttons=["copy"], elem_id=f"serve-{name}")
                for name in COMMANDS
            ]

    def form(self) -> list[Any]:
        """Return the fields of the form, in the order of its values."""
        return [
            *(self.model, self.kind, self.scheme, self.size, self.gpu, self.context, self.gptq, self.evaluate),
            *(self.where, self.output, self.name, self.private, self.request, *self.advanced),
        ]


def build(page: Page) -> gr.Blocks:
    """Lay the page out, to be mounted, and connect it with what it does."""
    with gr.Blocks(title="openquant", analytics_enabled=False) as blocks:
        parts = PageLayout()
        _connect_form(page, parts, blocks)
        _connect_runs(page, parts, blocks)
    return blocks


def _act(
    trigger: Callable[..., Any], problem: gr.HTML, button: gr.Button, work: Callable[..., Any], *of: list[Any]
) -> Any:
    """Do what may take a while: the last problem goes at once, and a button is busy until it is done."""
    begun = trigger(fn=None, outputs=[problem, button], js=BEGIN, **HIDDEN)
    done = begun.then(work, *of, **SHOWN)
    done.then(None, None, [button], js=END, **HIDDEN)
    return done


def _connect_form(page: Page, parts: PageLayout, blocks: gr.Blocks) -> None:
    """Search, show the fields that belong to a choice, and plan."""
    looked = [parts.model.input, blocks.load]
    gr.on(looked, page.search, [parts.model], [parts.matches], trigger_mode="always_last", **HIDDEN)

    parts.kind.change(
        lambda kind: (gr.update(visible=kind == ONE), gr.update(visible=kind == MIXED)),
        [parts.kind],
        [parts.scheme, parts.size],
        **HIDDEN,
    )
    parts.where.change(lambda where: gr.update(visible=where == THERE), [parts.where], [parts.repository], **HIDDEN)

    matched = parts.matches.select(lambda name: name, [parts.matches], [parts.model], **HIDDEN)
    chosen = parts.sections.select(choose_row, None, [parts.kind, parts.scheme], **HIDDEN)
    asked = [parts.model.submit, parts.gpu.submit, parts.context.submit, parts.plan.click]
    planned = [parts.problem, parts.planned, parts.sections]
    for trigger in (partial(gr.on, asked), matched.then, chosen.then):
        _act(trigger, parts.problem, parts.plan, page.plan, parts.form(), planned)


def _connect_runs(page: Page, parts: PageLayout, blocks: gr.Blocks) -> None:
    """Begin, stop and show runs, and publish outputs."""
    refresh: dict[str, Any] = {
        "fn": page.refresh,
        "inputs": [parts.selected, parts.seen],
        "outputs": [
            *(parts.run, parts.done, parts.runs, parts.status, parts.log, parts.stop, parts.problem, parts.result),
            *(parts.publishing, *parts.serving, parts.displayed, parts.seen),
        ],
        **HIDDEN,
    }
    begun = [parts.problem, parts.selected]
    to_publish = [parts.displayed, parts.to, parts.to_private, parts.to_request]
    for button, work, inputs, outputs in (
        (parts.convert, page.convert, parts.form(), [*begun, parts.planned]),
        (parts.publish, page.publish, to_publish, begun),
        (parts.stop, page.stop, [parts.displayed], []),
    ):
        _act(button.click, parts.problem, button, work, inputs, outputs).then(**refresh)

    parts.runs.select(lambda name: (name, ""), [parts.runs], begun[::-1], **HIDDEN).then(**refresh)
    parts.timer.tick(**refresh)
    blocks.load(**refresh)
