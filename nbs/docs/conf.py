"Sphinx configuration; `build.py` writes the pages that it reads."
import configparser, importlib.util, json
from pathlib import Path
from docutils import nodes
from sphinx.addnodes import desc_signature, pending_xref

HERE = Path(__file__).resolve().parent
ini = configparser.ConfigParser(delimiters=['='])
ini.read(HERE.parent.parent/'settings.ini', encoding='utf-8')

project, version, copyright = 'MultiGrain', ini['DEFAULT']['version'], ini['DEFAULT']['copyright']
release = version
language = 'en'
smartquotes = False
extensions = ['myst_nb', 'sphinx.ext.mathjax']
exclude_patterns = []

# Notebooks are shown with the outputs they were stored with.
nb_execution_mode = 'off'
nb_merge_streams = True
nb_render_markdown_format = 'myst' # tables that cells print are tables
nb_ipywidgets_js = {} # widgets need a kernel: nothing is loaded for them
myst_enable_extensions = ['dollarmath', 'amsmath', 'colon_fence', 'attrs_block']
myst_heading_anchors = 3
suppress_warnings = ['myst.header'] # a notebook may go from a title straight to a small heading

html_theme = 'furo'
html_title = f'MultiGrain {version}'
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_theme_options = dict(footer_icons=[], top_of_page_buttons=[],
                          light_css_variables={'color-brand-primary': '#0b5c7a', 'color-brand-content': '#0b6c8f'},
                          dark_css_variables={'color-brand-primary': '#6fc3e0', 'color-brand-content': '#6fc3e0'})
pygments_style, pygments_dark_style = 'friendly', 'monokai'
maximum_signature_line_length = 80
python_display_short_literal_types = True
add_module_names = False
toc_object_entries_show_parents = 'hide'

# One file with its own glyphs: formulas without a network, from a server or from disk.
MATHJAX = Path(importlib.util.find_spec('sphinx-mathjax-offline').submodule_search_locations[0])/'static'/'mathjax'
html_static_path = [str(HERE/'static'), str(MATHJAX/'tex-svg.js')]
mathjax_path = 'tex-svg.js'
html_css_files = ['multigrain.css']

def link_names(app, doctree):
    "A public name in code font becomes a link to its API page."
    names = json.loads((Path(app.srcdir)/'names.json').read_text())
    for node in list(doctree.findall(nodes.literal)):
        where, parents = names.get(node.astext().removesuffix('()')), []
        above = node.parent
        while above is not None: parents.append(type(above)); above = above.parent
        if not where or {nodes.title, nodes.reference, pending_xref, desc_signature} & {*parents}: continue
        ref = pending_xref(
            '',
            refdomain='py',
            reftype='mod' if where == node.astext() else 'obj',
            reftarget=where,
            refexplicit=True,
            refwarn=False,
            refdoc=app.env.docname,
        )
        node.replace_self(ref)
        ref += node

def setup(app):
    app.set_html_assets_policy('always') # the menu holds formulas, and is on every page
    app.connect('doctree-read', link_names)
    return dict(parallel_read_safe=True, parallel_write_safe=True)
