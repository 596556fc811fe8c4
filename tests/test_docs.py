"The documentation site: no warning, offline and whole; links hold, search finds; the commands of the guides exist."
import ast, fcntl, functools, http.server, json, os, re, shlex, subprocess, sys, threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from test_browser import browser # noqa: F401  a fixture: Chromium, required in CI

ROOT = Path(__file__).resolve().parent.parent
NBS = ROOT/'nbs'
NOTEBOOKS = sorted(
    o.relative_to(NBS) for o in NBS.rglob('*.ipynb') if not any(p[0] in '._' for p in o.relative_to(NBS).parts)
)
LOADS = {
    'script': 'src',
    'link': 'href',
    'img': 'src',
    'iframe': 'src',
    'source': 'src',
    'video': 'src',
    'audio': 'src',
    'embed': 'src',
    'object': 'data',
}

class Page(HTMLParser):
    "Links, loaded files and anchors of a page."
    def __init__(self, file):
        super().__init__()
        self.links, self.loads, self.ids = [], [], set()
        self.feed(file.read_text(encoding='utf-8'))
    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids |= {attrs[k] for k in ('id', 'name') if attrs.get(k)}
        if tag in LOADS and attrs.get(LOADS[tag]): self.loads.append(attrs[LOADS[tag]])
        if tag in ('a', 'area') and attrs.get('href'): self.links.append(attrs['href'])

@pytest.fixture(scope='session')
def site(tmp_path_factory):
    base = tmp_path_factory.getbasetemp()
    if 'PYTEST_XDIST_WORKER' in os.environ: base = base.parent # built once, for all workers
    with open(base/'site.lock', 'w') as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        if not (to := base/'site').exists():
            done = subprocess.run(
                [sys.executable, NBS / 'docs' / 'build.py', base / 'building'],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=600,
            )
            assert done.returncode == 0 and 'WARNING' not in done.stderr, done.stdout + done.stderr
            (base/'building').rename(to)
    return to

@pytest.fixture(scope='session')
def pages(site): return {o.resolve(): Page(o) for o in site.rglob('*.html')}

def test_every_notebook_is_a_page_of_the_menu(site, pages):
    home = {
        (site / urlsplit(o).path).resolve()
        for o in pages[(site / 'index.html').resolve()].links
        if urlsplit(o).path and not urlsplit(o).scheme
    }
    if (site / 'paper' / 'index.html').exists():
        home |= {
            (site / 'paper' / urlsplit(o).path).resolve()
            for o in pages[(site / 'paper' / 'index.html').resolve()].links
            if not urlsplit(o).scheme
        }
    for o in NOTEBOOKS:
        if o != Path('index.ipynb'):
            assert (
                site / o.with_suffix('.html')
            ).resolve() in home, f'nbs/{o} cannot be reached from the home page'

def test_internal_links_and_anchors_exist(site, pages):
    broken = []
    for file, page in pages.items():
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc: continue
            to = (file.parent/unquote(parts.path)).resolve() if parts.path else file
            if to.is_dir(): to /= 'index.html'
            if not to.exists():
                broken.append(f'{file.relative_to(site.resolve())}: {link}')
            elif parts.fragment and to in pages and unquote(parts.fragment) not in pages[to].ids:
                broken.append(f'{file.relative_to(site.resolve())}: {link} (no such anchor)')
    assert not broken, '\n'.join(broken[:20])

def test_nothing_is_loaded_from_elsewhere(site, pages):
    for file, page in pages.items():
        assert [o for o in page.loads if urlsplit(o).scheme not in ('', 'data') or urlsplit(o).netloc] == [], file
        assert not re.search(
            r'\bcdn\b|googleapis|unpkg\.com|jsdelivr|cdnjs', file.read_text(encoding='utf-8')
        ), file
    for file in site.rglob('*.css'):
        assert not re.search(r'(@import\s*|url\(\s*)["\']?(https?:)?//', file.read_text(encoding='utf-8')), file

def test_search_index_knows_the_words(site):
    text = (site/'searchindex.js').read_text(encoding='utf-8')
    index = json.loads(text[text.index('(') + 1:text.rindex(')')])
    at = [o if isinstance(o, list) else [o] for o in (index['terms']['gem'], index['titleterms']['gem'])]
    assert {'01_gem', 'api/gem', '04_loss'} <= {index['docnames'][i] for o in at for i in o}
    assert any(
        name == 'GeM' for _, _, _, _, name in index['objects'].get('multigrain.gem', [])
    ), 'the class has no entry of its own'

def test_api_pages_hold_every_public_name(site, pages):
    for file in sorted((ROOT/'multigrain').glob('[!_]*.py')):
        public = next(
            ast.literal_eval(o.value)
            for o in ast.parse(file.read_text()).body
            if isinstance(o, ast.Assign) and getattr(o.targets[0], 'id', '') == '__all__'
        )
        ids = pages[(site/'api'/f'{file.stem}.html').resolve()].ids
        assert [o for o in public if f'multigrain.{file.stem}.{o}' not in ids] == []
    text = (site/'api'/'search.html').read_text(encoding='utf-8')
    assert 'multigrain.search.Index.build' in text
    assert 'false-positive rate of grain' in text  # a comment beside an argument

def test_exported_cells_are_marked_and_directives_are_gone(site):
    text = (site/'01_gem.html').read_text(encoding='utf-8')
    assert 'tag_export' in text and not re.search(r'#\|\s*(export|hide|default_exp)', re.sub('<[^>]*>', '', text))

# The commands that readers are told to type.

def commands():
    "Lines of the shell blocks of the home page and the guides."
    for nb in [NBS/'index.ipynb', *sorted((NBS/'guides').glob('*.ipynb'))]:
        for cell in json.loads(nb.read_text())['cells']:
            if cell['cell_type'] != 'markdown': continue
            for block in re.findall(r'```sh\n(.*?)```', ''.join(cell['source']), re.S):
                for line in block.replace('\\\n', ' ').splitlines():
                    if words := shlex.split(re.sub(r'^for .*? do |; done', '', line), comments=True):
                        yield nb.name, words

def parameters(nb):
    "Names that the parameters cell of a notebook assigns."
    cell = next(c for c in json.loads(nb.read_text())['cells'] if 'parameters' in c['metadata'].get('tags', []))
    return {t.id for o in ast.parse(''.join(cell['source'])).body if isinstance(o, ast.Assign) for t in o.targets}

def test_commands_of_the_guides_exist():
    from multigrain.launch import parameter_names, parse_pairs
    from multigrain.recipe import Recipe, make_recipe
    targets, seen = set(re.findall(r'^([a-z]+):', (ROOT/'Makefile').read_text(), re.M)), set()
    for where, words in commands():
        kind = words[0]
        if kind == 'make': assert words[1] in targets, (where, words)
        elif kind == 'papermill':
            names = [words[i + 1] for i, o in enumerate(words) if o in ('-p', '-r')]
            assert set(names) <= parameters(ROOT/words[1]), (where, words)
        elif kind == 'torchrun' and '-m' in words:
            at = words.index('-m')
            assert words[at + 1] == 'multigrain.training'
            given = parse_pairs(words[at + 2:], parameter_names())
            known = {k: v for k, v in given.items() if k in Recipe.__dataclass_fields__}
            make_recipe(known.pop('preset'), **known) # checks the values
        else: assert kind in ('torchrun', 'python', 'git', 'cd', 'pip'), (where, words)
        seen.add(kind)
    assert {'make', 'papermill', 'torchrun'} <= seen

# In a browser, over a server and from disk.

class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_): pass

@pytest.mark.parametrize('served', [True, False], ids=['http', 'file'])
@pytest.mark.browser
def test_pages_in_a_browser(site, browser, served): # noqa: F811
    server = (
        http.server.ThreadingHTTPServer(('127.0.0.1', 0), functools.partial(Quiet, directory=str(site)))
        if served
        else None
    )
    if served: threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f'http://127.0.0.1:{server.server_port}' if served else site.as_uri()
    try:
        page, asked, errors = browser.new_page(), [], []
        page.on('request', lambda o: asked.append(o.url))
        page.on('pageerror', lambda o: errors.append(str(o)))
        page.goto(f'{base}/01_gem.html')
        page.wait_for_selector('mjx-container', timeout=30_000)
        assert page.locator('mjx-merror').count() == 0 and page.locator('mjx-container').count() > 20
        page.goto(f'{base}/search.html?q=GeM')
        page.wait_for_selector('#search-results li a', timeout=30_000)
        page.wait_for_function(
            "document.querySelector('.search-summary').innerText.includes('found')", timeout=30_000
        )
        found = page.locator('#search-results li a').evaluate_all('some => some.map(o => o.href)')
        assert any('01_gem.html' in o for o in found) and any('api/gem.html' in o for o in found)
        assert [o for o in asked if not o.startswith((base, 'data:'))] == []
        assert [
            o for o in errors if served or 'fetch' not in o
        ] == []  # from disk, results come without the excerpts that a browser would have to fetch
    finally:
        if served: server.shutdown(); server.server_close()
