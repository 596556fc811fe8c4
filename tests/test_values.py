"The layer that makes the numbers, by value: recipe, studies, claims. Each test names the mistake that it would catch."
import dataclasses, json, math
from pathlib import Path

import numpy as np, pytest, torch
from multigrain.claims import registered, rule_arms, rules
from multigrain.datasets import read_split, split_names, training_sets, world_folder
from multigrain.embed import embed
from multigrain.evaluate import accuracy, copydays_map
from multigrain.model import MultiGrain
from multigrain.recipe import PRESETS, Recipe, make_recipe
from multigrain.studies import ARMS, STUDIES, arm_recipe, asks, find_study, measure_set, open_set
from multigrain.whiten import Whitening

ROOT = Path(__file__).resolve().parent.parent

PAPER = dict( # section 4.1, table B.1 and C.1; momentum and weight decay from the published code
    trunk='resnet50', pretrained=False, lam=.5, p=3., learn_p=False, m=3, augmentation='full', min_crop=.08,
    resolution=224, batch_size=512, iterations=5005, epochs=120, lr=.2, drops=(30, 60, 90), warmup=0., momentum=.9,
    weight_decay=1e-4, beta=1.2, beta_lr=.1, normalize='pairs', sampling='exact', same_class='allow')

def test_recipe_is_the_papers():
    recipe = dataclasses.asdict(make_recipe('paper', data='x'))
    assert {k: recipe[k] for k in PAPER} == PAPER
    others = dict(data='x', batch_norm='local', gather=False, accumulate=1, precision='float32', compile=False,
                  exact=True, bad='raise', seed=0, preset='paper', group=0, bn_steps=0, schedule='drops')
    assert {k: v for k, v in recipe.items() if k not in PAPER} == others, 'a new field: is its default the paper?'
    assert make_recipe('paper', data='x', augmentation='AA').iterations == 7508

def test_recipe_drops_are_where_the_paper_says():
    "Not one epoch later, as in the published code."
    from multigrain.training import lr_factor
    r = make_recipe('paper', data='x')
    for drop, factor in zip(r.drops, (.1, .01, .001)):
        assert lr_factor(drop - 1, r.iterations - 1, r.iterations, r.drops) == pytest.approx(10*factor)
        assert lr_factor(drop, 0, r.iterations, r.drops) == pytest.approx(factor)

def test_recipe_rates_of_what_is_learned():
    "beta's rate is absolute, and neither beta nor p decays; everything else does."
    from multigrain.loss import JointLoss
    from multigrain.training import parameter_groups
    for lr in (.2, .05):
        r = make_recipe('smoke', lr=lr, learn_p=True)
        groups = parameter_groups(MultiGrain('mini', n_classes=3, learn_p=True), JointLoss(.5), r)
        found = {o['name']: (o['lr'], o['weight_decay']) for o in groups}
        assert found == dict(weights=(lr, r.weight_decay), p=(lr, 0.), beta=(.1, 0.))

def test_recipe_momentum_and_decay_reach_the_optimizer():
    "Two steps of SGD by hand."
    r = make_recipe('paper', data='x')
    w = torch.nn.Parameter(torch.tensor(1.))
    sgd = torch.optim.SGD([w], lr=r.lr, momentum=r.momentum, weight_decay=r.weight_decay)
    v, x = 0., 1.
    for g in (.5, -.25):
        w.grad = torch.tensor(g); sgd.step()
        v = .9*v + g + 1e-4*x
        x -= .2*v
    assert w.item() == pytest.approx(x, abs=1e-6)

def test_recipe_of_every_preset_is_complete():
    for name in PRESETS: assert isinstance(make_recipe(name, data='smoke'), Recipe)

# Studies

TABLE = { # arm -> what differs from the study, in the words of the paper's table 2
    'uniform p=1': (1., 1, 1.), 'uniform p=3': (1., 1, 3.), 'RA p=1': (1., 3, 1.), 'RA p=3': (1., 3, 3.),
    'MultiGrain p=1': (.5, 3, 1.), 'MultiGrain p=3': (.5, 3, 3.), 'AA p=1': (.5, 3, 1.), 'AA p=3': (.5, 3, 3.)}

@pytest.mark.parametrize('arm', TABLE)
def test_studies_arms_are_what_they_are_called(arm):
    r = arm_recipe(find_study('paper', str(ROOT)), arm, 0)
    assert (r.lam, r.m, r.p, r.augmentation) == (*TABLE[arm], 'AA' if arm.startswith('AA') else 'full')
    assert r.iterations == (7508 if arm.startswith('AA') else 5005)

def test_studies_differ_in_one_thing_at_a_time():
    for study in STUDIES.values():
        study = dataclasses.replace(study, data=study.data or 'x')
        ladder = [arm_recipe(study, o, 3) for o in ('uniform p=1', 'RA p=1', 'MultiGrain p=1', 'MultiGrain p=3')]
        changed = [{f.name for f in dataclasses.fields(a) if getattr(a, f.name) != getattr(b, f.name)}
                   for a, b in zip(ladder, ladder[1:])]
        assert changed == [{'m'}, {'lam'}, {'p'}], study.name

def test_studies_resolutions():
    assert {k: o.s for k, o in STUDIES.items()} == dict(smoke=(32, 48), mini=(32, 48, 64), tiny=(32, 48, 64),
                                                         claims=(32, 48, 64), cifar=(32,),
                                                         paper=(224, 500, 800))
    for study in STUDIES.values():
        assert study.s[0] == arm_recipe(dataclasses.replace(study, data='x'), 'RA p=1', 0).resolution

def test_studies_records_keep_their_names():
    "A committed record is found by the hash of its own parameters."
    from multigrain.runs import Run, run_hash
    records = sorted((ROOT/'data/paper/store').glob('*/run.json'))
    assert len(records) >= 15
    for o in records: assert o.parent.name.split('-')[1] == run_hash(Run(o.parent).parameters)

@pytest.fixture(scope='module')
def smoke(): return find_study('smoke')

def test_studies_in_aug_is_made_of_training_images(smoke):
    learn, val = training_sets('smoke')
    found = open_set(smoke, 'in_aug').images
    assert set(found.paths) <= set(learn.paths) and not set(found.paths) & set(val.paths)
    assert len(found) == 5*2*len(learn.classes)

@pytest.mark.parametrize('name', ['holidays', 'ukbench', 'copydays'])
def test_studies_whitening_is_learned_elsewhere(smoke, name):
    found = open_set(smoke, name)
    assert not set(found.whiten.paths) & set(found.images.paths)
    assert {Path(o).parent for o in found.whiten.paths} == {world_folder('smoke')/'whiten'}

@pytest.fixture(scope='module')
def net(): return MultiGrain('mini', 3., 4, seed=1).eval()

@pytest.mark.parametrize('s,square', [(32, True), (48, False)])
def test_studies_values_of_accuracy(smoke, net, s, square):
    "Square crops at the training resolution, whole images above it; every exponent."
    found = open_set(smoke, 'val')
    rows = {(o.set, o.p): o.value for o in measure_set(net, smoke, 'val', s, found)}
    for p in (1., 3., 10.):
        logits = embed(net, found.images, s, square, p, logits=True, progress=False).logits
        assert rows['val top-1', p] == accuracy(logits, found.images.labels, [1])['top-1'].value
    assert {o[1] for o in rows} == set(map(float, range(1, 11)))

@pytest.mark.parametrize('s,square', [(32, True), (48, False)])
@pytest.mark.parametrize('name', ['val', 'copydays'])
def test_studies_crop_only_at_the_training_resolution(smoke, net, monkeypatch, name, s, square):
    "Scores of so few images could be equal by chance, so the protocol itself is looked at."
    import multigrain.studies as studies
    seen, real = [], studies.score_benchmark
    def spy(*args, **more):
        seen.extend(found := real(*args, **more))
        return found
    monkeypatch.setattr(studies, 'score_benchmark', spy)
    measure_set(net, smoke, name, s, open_set(smoke, name), [1.])
    assert seen and all(o.protocol['square'] == square and o.protocol['s'] == s for o in seen)

def test_studies_values_of_retrieval(smoke, net):
    "Plain and whitened at the same exponent, the whitening from its own images."
    found = open_set(smoke, 'copydays')
    rows = {(o.p, o.dims): o.value for o in measure_set(net, smoke, 'copydays', 48, found)}
    x, w = (embed(net, o, 48, False, 2., progress=False).embedding for o in found)
    white = Whitening.fit(torch.tensor(np.asarray(w)), net.dim, 'oas') # twelve images, 128 dimensions
    assert rows[2., 0] == copydays_map(x, found.images).value
    assert rows[2., net.dim] == copydays_map(white.transform(torch.tensor(np.asarray(x))), found.images).value

# The exponent

def test_value_of_finetuned_p_with_momentum(net):
    "Two steps by hand: the paper's rate, its decay and momentum 0.9."
    from multigrain.resolution import finetune_p, poly_lr
    learn, _ = training_sets('smoke')
    few = learn.take(np.concatenate([np.flatnonzero(learn.labels == c)[:2] for c in range(4)]))
    curve = finetune_p(net, few, 48, per_class=2, batch_size=4, lr=.5, progress=False)
    p = [*curve.curve.p, curve.p]
    assert len(p) == 3
    assert curve.curve.lr.tolist() == pytest.approx([poly_lr(0, 2, .5), poly_lr(1, 2, .5)]) == [.5, .5*.5**.9]
    first, second = p[1] - p[0], p[2] - p[1]
    g = -first/.5 # the first step is the gradient alone
    plain = finetune_p(net, few, 48, per_class=2, batch_size=4, lr=.5, momentum=0., progress=False)
    assert plain.curve.p[1] == pytest.approx(p[1], abs=1e-6) # the same point, so the same second gradient
    g2 = -(plain.p - plain.curve.p[1])/plain.curve.lr[1]
    assert abs(.9*g) > 1e-4 and second == pytest.approx(-curve.curve.lr[1]*(.9*g + g2), abs=1e-5)

# Negatives

def test_value_of_negatives_each_positive_has_its_own():
    "j* ~ p(.|i) is drawn for each pair: an anchor with four positives does not share one negative."
    from multigrain.margin import MarginLoss
    m, images = 5, 40
    loss, e = MarginLoss(max_distance=None), torch.eye(m*images)[:, :200] # all at one distance: negatives are uniform
    instance = torch.arange(m*images)//m
    loss(e, instance, generator=torch.Generator().manual_seed(0))
    pairs = loss.pairs
    for i in range(0, m*images, 20):
        drawn = pairs.negative[pairs.anchor == i]
        assert len(drawn) == m - 1 and (instance[drawn] != instance[i]).all()
    same = np.mean([len(set(pairs.negative[pairs.anchor == i].tolist())) == 1 for i in range(m*images)])
    assert same < .05

# Claims

def test_claims_conditions_of_the_paper_hold_for_the_paper():
    "The paper's own values are within all bounds, those of the small studies are not."
    known = json.loads((ROOT/'data/claims.json').read_text())
    for name, o in known['conditions'].items():
        if name == 'seeds' or o['paper'] is None: continue # the paper has one seed; it prints no training accuracy
        assert o.get('least', -math.inf) <= o['paper'] <= o.get('most', math.inf), name
    assert {o for names in known['kinds'].values() for o in names} <= set(known['conditions'])
    assert set(ARMS) >= {'uniform p=1', 'RA p=1', 'MultiGrain p=1', 'MultiGrain p=3'}

# -- the splits of the registered studies ---------------------------------------------------------

PILOT = set('''n01784675 n02085620 n02129165 n02480495 n02788148 n02793495 n02815834 n02843684
    n03026506 n03201208 n03388043 n03424325 n03804744 n03837869 n03902125 n03937543
    n04251144 n04371430 n07875152 n09193705'''.split())

@pytest.mark.parametrize('name,test', [('tiny80', 10_400), ('cifar10', 10_000)])
def test_studies_splits_are_apart(name, test):
    "No image that judges, or that chooses, is ever trained on; every seed has training images of its own."
    split = read_split(f'data/splits/{name}.json')
    def flat(part): return [o for some in split.parts[part].values() for o in some]
    pool, val, judges = map(flat, ('pool', 'val', 'test'))
    assert len(judges) == len(set(judges)) == test
    assert not set(pool) & set(val) and not set(pool) & set(judges) and not set(val) & set(judges)
    shares = [{o for some in split_names(split, 'train', k).values() for o in some} for k in range(split.seeds)]
    assert all(o <= set(pool) and len(o) == split.per_class*len(split.parts['pool']) for o in shares)
    assert len({tuple(sorted(o)) for o in shares}) == split.seeds
    assert list(split.parts['pool']) == list(split.parts['val']) == list(split.parts['test']) # the same labels

def test_studies_split_leaves_the_pilots_alone():
    split = read_split('data/splits/tiny80.json')
    assert set(split.parts['whiten']) == PILOT and not PILOT & set(split.parts['pool'])
    for c, some in split.parts['copies'].items(): assert set(some) <= set(split.parts['test'][c])
    assert 10*96 <= sum(map(len, split.parts['whiten'].values())) # ten images for each dimension

def test_claims_are_registered_with_their_arms():
    "Arms and seeds of a study are those that were registered, and all rules can be read."
    for name, o in registered()['studies'].items():
        study = find_study(name)
        assert study.seeds == o['seeds'] and asks(study, 'claims').arms == o['arms'] and rule_arms(rules(name))
        assert set(rule_arms(rules(name))) <= set(o['arms'])
