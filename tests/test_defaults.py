"""Right by default on photographs: the threshold of copies, and what `recommend` chooses.

Photographs of installed packages; and where `../shared/data` lies beside the checkout, three domains: ImageNet
validation (one photograph a class), Oxford Flowers 17 (one domain) and single classes of Tiny-ImageNet (64 px).
Vectors are those of Lite0 at 112 px and p = 3, made once. What is a near-duplicate is not decided by these vectors,
but by pixels: a difference hash (dHash, 64 bits) within 10 bits of an earlier one, also mirrored.
The same functions make the stored table of nbs/bench/defaults.ipynb.
"""
import math
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np, pytest
from PIL import Image
from multigrain.benchmark import (compare_whitening, decide, recommend, some_images, strong_copies,
                                  whitening_advice)
from multigrain.catalog import open_model
from multigrain.embed import embed
from multigrain.photos import has_views, photo_set
from multigrain.readers import image_folder
from multigrain.vectors import ask_images, nearest_rows, neighbour_law, rate_interval, unit_rows

SHARED = Path(__file__).resolve().parents[2]/'shared'/'data'
FPR, SHARES, SPLITS = .01, (0, .05, .2, .5), 200
beside = pytest.mark.skipif(not SHARED.is_dir(), reason='no ../shared/data beside the checkout')
packages = pytest.mark.skipif(not has_views(), reason='the packages with photographs are not installed')

# Photographs, without near-duplicates.

def difference_hash(path):
    "Which of neighbouring pixels of a tiny grey image is brighter: 64 bits."
    with Image.open(path) as im: x = np.asarray(im.convert('L').resize((9, 8), Image.LANCZOS), int)
    return x[:, 1:] > x[:, :-1]

def without_duplicates(images, bits=10):
    "A set without the photographs that look like an earlier one, by their pixels alone."
    hashes, kept = np.array([difference_hash(o) for o in images.paths]), []
    mirrored = ~hashes[:, :, ::-1]
    for i in range(len(hashes)):
        near = [(hashes[kept] != o[i]).sum((1, 2)).min(initial=64) for o in (hashes, mirrored)]
        if min(near) > bits: kept.append(i)
    return images.take(np.array(kept))

def tiny_class(number):
    "One class of Tiny-ImageNet: 200 training photographs."
    return image_folder(sorted((SHARED/'tiny_imagenet100'/'train').iterdir())[number])

def package_photographs():
    "One photograph of each thing."
    found = photo_set()
    return found.take(np.sort(np.unique(found.groups, return_index=True)[1]))

DOMAINS = {'ImageNet': lambda: some_images(image_folder(SHARED/'imagenet_val1k'/'val'), 600),
           'flowers': lambda: some_images(image_folder(SHARED/'flowers17'), 600),
           'Tiny, class 0': lambda: tiny_class(0), 'Tiny, class 1': lambda: tiny_class(1),
           'packages': package_photographs}
LARGE = [*DOMAINS][:-1]

# Their vectors.

class Vectors(NamedTuple):
    "Unit vectors of a domain."
    images:np.ndarray # (n, d), in random order
    copies:np.ndarray # strong copies of the first quarter of them

@cache
def network(): return open_model('trunk:lite0').model

@cache
def vectors(domain):
    "The vectors of a domain, embedded once."
    images = without_duplicates(DOMAINS[domain]())
    images = images.take(np.random.default_rng(0).permutation(len(images)))
    files = strong_copies(part := images.take(slice(len(images)//4)), len(part))
    return Vectors(*(unit_rows(embed(network(), o, 112, True, 3., progress=False).embedding) for o in (images, files)))

# The threshold of copies.

def threshold(x): return neighbour_law(ask_images(x), len(x)).threshold(FPR)
def exceeding(x, fresh, t): return int((nearest_rows(x, fresh, 1)[1][:, 0] > t).sum())
def most(n): return rate_interval(n, math.floor((n + 1)*FPR))[1] # upper end of the rate that n images allow

def planted(domain):
    "For shares of planted edits: threshold, fresh images above it, copies found."
    x, copies = vectors(domain)
    half, rows = len(x)//2, {}
    for share in SHARES:
        k = min(round(share*half), len(copies))
        t = threshold(full := np.concatenate([x[:half], copies[:k]]))
        found = ((copies[:k]*x[:k]).sum(1) > t).mean() if k else np.nan
        above = exceeding(full, x[half:], t)/len(x[half:])
        rows[share] = dict(images=half, edits=k, threshold=t, fresh=above, found=found)
    return rows

def moves(domain, draws=20):
    "How far planted edits move the threshold at most, for databases of other images each time."
    x, copies = vectors(domain)
    half, k, found = len(x)//2, len(copies), []
    for i in range(draws): # the originals of the edits, in another order, and some others
        rng = np.random.default_rng([9, i])
        order, rest = rng.permutation(k), k + rng.permutation(len(x) - k)[:half - k]
        base = np.concatenate([x[order], x[rest]])
        t = [threshold(np.concatenate([base, copies[order[:round(o*half)]]])) for o in SHARES]
        found.append(np.abs(np.array(t) - t[0]).max())
    return np.array(found)

def splits(domain):
    "Counts of false positives over random halves, and the beta-binomial interval that predicts 95 % of them."
    x, rng = vectors(domain).images, np.random.default_rng(8)
    n = len(x)//2
    k = math.floor((n + 1)*FPR)
    interval = np.quantile(rng.binomial(n, rng.beta(k + 1, n - k, 100_000)), [.025, .975])
    orders = [rng.permutation(len(x)) for _ in range(SPLITS)]
    counts = [exceeding(x[o[:n]], x[o[n:2*n]], threshold(x[o[:n]])) for o in orders]
    return np.array(counts), interval

def check_rate(domain):
    for row in planted(domain).values(): assert row['fresh'] <= most(row['images']), (domain, row)
    counts, (low, high) = splits(domain)
    assert ((counts >= low) & (counts <= high)).mean() >= .9, (domain, counts)

@packages
def test_few_photographs_keep_their_rate(monkeypatch, tmp_path):
    "Photographs of packages: planted edits do not raise the rate of false positives, nor do 200 splits."
    monkeypatch.setenv('MULTIGRAIN_RUNS', str(tmp_path))
    check_rate('packages')

@beside
@pytest.mark.slow
@pytest.mark.parametrize('domain', LARGE)
def test_planted_edits_do_not_move_the_threshold(domain, monkeypatch, tmp_path):
    "Three domains: the rate stays, and the threshold moves less than 0.02 (0.04 where the images are 100)."
    monkeypatch.setenv('MULTIGRAIN_RUNS', str(tmp_path))
    check_rate(domain)
    rows = planted(domain)
    moved = [abs(o['threshold'] - rows[0]['threshold']) for o in rows.values()]
    assert max(moved) < (.02 if rows[0]['images'] > 200 else .04), (domain, moved)

# Whitening.

def three_flowers():
    "120 photographs of three kinds of flowers, in folders."
    found = image_folder(SHARED/'flowers17')
    return found.take(np.concatenate([np.flatnonzero(found.labels == c)[:40] for c in range(3)]))

@beside
@pytest.mark.slow
def test_a_whitening_that_ruins_the_labels_is_not_advised(monkeypatch, tmp_path):
    "From 120 images it gains nothing certain on copies, and loses the labels: the model stays as it is."
    monkeypatch.setenv('MULTIGRAIN_RUNS', str(tmp_path))
    copies, labels = compare_whitening(network(), three_flowers(), 112, progress=False)
    assert labels.high < -5 < copies.after - copies.before
    assert not whitening_advice([copies, labels], 'lite0').endswith('use the whitened model')
    if copies.low <= 0: assert whitening_advice([copies, labels], 'lite0').endswith('as it is, without whitening')

# The choice of settings.

def few_classes():
    "Ten classes of Tiny-ImageNet, validation."
    found = image_folder(SHARED/'tiny_imagenet100'/'val')
    return found.take(found.labels < 10)

FOLDERS = {'ImageNet, copies': (DOMAINS['ImageNet'], True), 'flowers, labels': (DOMAINS['flowers'], False),
           'Tiny, labels': (few_classes, False)}

def regrets(found):
    "How far the choice of each half is below the best of the grid on the other; and how far the usual setting is."
    rows = []
    for part in (0, 1):
        seen, unseen = (found.values[:, (found.parts == part) == o] for o in (False, True))
        chosen, means = decide(found.tried, seen, found.usual)[0], unseen.mean(1)
        rows.append([means.max() - means[found.tried.index(o)] for o in (chosen, found.usual)])
    return np.mean(rows, 0)

def asked(name, n=150):
    "What is recommended for a folder, of sixteen settings."
    make, copies = FOLDERS[name]
    return recommend(network(), some_images(make(), n), (96, 128), ps=(1., 3.), copies=copies, progress=False)

@beside
@pytest.mark.slow
@pytest.mark.parametrize('name', FOLDERS)
def test_the_recommendation_is_near_the_best_of_an_unseen_half(name, monkeypatch, tmp_path):
    monkeypatch.setenv('MULTIGRAIN_RUNS', str(tmp_path))
    chosen, usual = regrets(asked(name))
    assert chosen <= 1, (name, chosen, usual)
