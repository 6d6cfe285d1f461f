"""`openquant web`: a page in the browser that plans, converts and publishes. It needs the extra `web`.

view             plan, table of schemes and errors as HTML, without a server
choices          what a visitor chose, checked, the commands that do it, and its plan
runs             the runs, one at a time, and how the page shows one
page             the page, made with Gradio
server           serves the page, and says who may ask for what

serve_page(find_roots(("models",)), 7860, ready=print)
"""
