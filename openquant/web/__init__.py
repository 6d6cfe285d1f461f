"""`openquant web`: a page in the browser that plans, converts and publishes. It needs the extra `web`.

view     plan, table of schemes and errors as HTML, which the static Space shows too
"""
