"""Saved posteriors: what comes back has the same bits, and what does not belong together is refused by name.

Tests `load.py`, `network_record.py`, `operator_record.py`.
"""

import copy
import dataclasses
import pathlib
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributions import Laplace as DoubleExponential
from torch.utils.data import DataLoader, TensorDataset

import curvops as co
from curvops import storage
from curvops.network import likelihoods
from curvops.network.trained import network_record
from curvops.operators import operator_record
from tests.zoo import ZOO, call, points
from tests.zoo_modules import Applied

DOUBLE = torch.float64
Gaussian = co.likelihoods.Gaussian


def normal(*shape, dtype=DOUBLE, seed=1):
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def net(dtype=DOUBLE, outputs=3, activation=nn.Tanh, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 3), activation(), nn.Linear(3, outputs)).to(dtype)


def data(dtype=DOUBLE):
    return normal(12, 4, dtype=dtype), torch.arange(12) % 3


def linearised(dtype=DOUBLE, likelihood="classification", **options):
    model = net(dtype)
    return model, co.linearize(model, data(dtype), likelihood, **options)


def laplace(lin, curvature=co.GGN, prior_precision=1.0, **options):
    return co.laplace(lin, curvature, prior_precision, check_mode=False, **options)


def answers(post, x, evidence=True):
    """What a posterior says, as tensors: the rest is made of it."""
    found = [post.predict(x).mean, post.predict(x).covariance_matrix, post.mean, post.prior_mean]
    found += [post.sample(2, torch.Generator().manual_seed(0))]
    return [*found, post.log_evidence(mode="map").value] if evidence else found


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        assert a.dtype == b.dtype and torch.equal(a.detach(), b)


def round_trip(post, path, model, *args, **options):
    post.save(path)
    return co.load(path, copy.deepcopy(model), *args, **options)


def test_a_function_that_shows_progress_is_not_saved(tmp_path):
    model, lin = linearised(progress=lambda *step: None)
    post = laplace(lin, 2.0 * co.KFAC(lin), 0.5)
    assert post.curvature.progress is lin.passes.progress
    assert round_trip(post, tmp_path / "post", model).curvature.progress is None


def test_a_loaded_posterior_is_tuned_and_saved_like_any_other(tmp_path):
    model, lin = linearised()
    post, x = laplace(lin, co.KFAC), normal(3, 4, seed=7)
    back = round_trip(post, tmp_path / "p", model)
    first = back.curvature.blocks[0]
    assert first.known_eigen is None  # it was not asked for before
    expected = answers(post, x)
    assert_same(expected, answers(back, x))
    again = round_trip(back, tmp_path / "p", model)
    kept = again.curvature.blocks[0].known_eigen
    assert_same(first.known_eigen._args, kept._args)
    assert kept is again.curvature.blocks[0].eigen()
    assert_same(expected, answers(again, x))
    assert_same(*([each.prior_precision] for each in map(co.evidence.maximize, (post, again))))


def refusal(work, *args, **options):
    with pytest.raises((ValueError, TypeError, OSError)) as raised:
        work(*args, **options)
    return str(raised.value)


@pytest.mark.parametrize("asked", [True, False])
def test_the_gap_of_the_mode_comes_back_where_it_is_known(asked, tmp_path):
    """One gradient. Every kind of prior is saved in `test_combinations.py`."""
    model, lin = linearised()
    prior = torch.linspace(0.5, 2.0, lin.num_parameters, dtype=DOUBLE)
    post = laplace(lin, co.DiagonalGGN, prior, prior_mean=normal(lin.num_parameters))
    gap = post.mode_gap if asked else None
    back, x = round_trip(post, tmp_path / "p", model), normal(3, 4, seed=7)
    assert_same(answers(post, x), answers(back, x))
    if asked:
        assert gap == back.mode_gap
    else:
        assert "training points" in refusal(lambda: back.mode_gap)


def test_the_next_task_takes_a_loaded_posterior_as_its_prior(tmp_path):
    model, lin = linearised()
    post = laplace(lin, co.KFAC)
    back = round_trip(post, tmp_path / "p", model)
    new = co.linearize(net(seed=5), (normal(9, 4, seed=4), torch.arange(9) % 3), "classification")
    x = normal(3, 4, seed=7)
    expected, found = (each.update(new, check_mode=False) for each in (post, back))
    assert_same(answers(expected, x, False), answers(found, x, False))
    assert "count twice" in refusal(back.update, lin)  # the same data
    assert_same([post.penalty(post.mean + 1)], [back.penalty(post.mean + 1)])
    again = round_trip(found, tmp_path / "q", net(seed=5))
    assert_same(answers(expected, x, False), answers(again, x, False))


def test_what_holds_the_data_of_another_task_is_refused_at_saving(tmp_path):
    _, lin = linearised()
    other = co.linearize(net(seed=5), (normal(9, 4, seed=4), torch.arange(9) % 3), "classification")
    message = refusal(laplace(lin).update(other, check_mode=False).save, tmp_path / "p")
    assert "the prior precision holds a curvature of other data" in message and "co.low_rank(op)" in message
    second = co.linearize(net(), (normal(9, 4, seed=4), torch.arange(9) % 3), "classification")
    message = refusal(laplace(lin, co.GGN(lin) + co.GGN(second)).save, tmp_path / "p")
    assert "the curvature holds a curvature of other data" in message

    class Mine(co.linalg.Dense):
        pass

    message = refusal(laplace(lin, Mine(torch.eye(lin.num_parameters, dtype=DOUBLE), psd=True)).save, tmp_path / "p")
    assert "holds Mine, an operator that cannot be saved" in message
    assert not (tmp_path / "p").exists()


# Data


def test_data_are_those_that_they_were(tmp_path):
    model, lin = linearised()
    x, y = data()
    path = tmp_path / "p"
    laplace(lin, co.KFAC).save(path)
    in_parts, turned = [(x[:5], y[:5]), (x[5:], y[5:])], (x.flip(0), y.flip(0))
    for same in ((x, y), TensorDataset(x, y), [(x, y)], DataLoader(TensorDataset(x, y), 12), in_parts, turned):
        back = co.load(path, model, same)
        torch.testing.assert_close(back.lin.gradient(), lin.gradient(), rtol=1e-12, atol=1e-12)
    assert "have 11 points, but those of the saved posterior were 12" in refusal(co.load, path, model, (x[:11], y[:11]))
    for other in ((x, (y + 1) % 3), (x.flip(0), y), (x + 1e-15, y), (torch.cat([x[:11], x[:1]]), y)):
        assert "they have other values" in refusal(co.load, path, model, other)
    assert "Pass a pair (inputs, targets)" in refusal(co.load, path, model, {"x": x})
    laplace(co.linearize(model, [(x[:7], y[:7]), (x[7:], y[7:])], "classification")).save(path)
    assert co.load(path, model, (x, y)).lin.data.sizes == (7, 5)  # tensors are divided as the batches were
    drawn = laplace(lin, co.GGN(lin, mc_samples=2, generator=torch.Generator().manual_seed(0)))
    drawn.save(path)
    torch.testing.assert_close(co.load(path, model, in_parts).predict(x).variance, drawn.predict(x).variance)
    assert "pass the data in the order they had then" in refusal(co.load, path, model, turned)


def test_sample_weights_are_asked_for_as_they_were(tmp_path):
    model, (x, y) = net(), data()
    weights = torch.linspace(0.5, 2, 12, dtype=DOUBLE)
    lin = co.linearize(model, (x, y, weights), "classification", weights=True)
    post = laplace(lin)
    assert_same(answers(post, x), answers(round_trip(post, tmp_path / "p", model, (x, y, weights)), x))
    assert "weights" in refusal(co.load, tmp_path / "p", model, (x, y))


def test_without_data_every_method_that_needs_them_says_so(tmp_path):
    model, lin = linearised()
    back = round_trip(laplace(lin, co.KFAC), tmp_path / "p", model).lin
    for work in (
        *(back.outputs, back.log_likelihood, back.gradient, lambda: co.KFAC(back), lambda: co.DiagonalGGN(back)),
        lambda: co.GGN(back) @ back.theta,
        lambda: co.Hessian(back) @ back.theta,
        lambda: back.jacobian() @ back.theta,
        lambda: back.gradients() @ back.theta,
        lambda: co.subsample(back, 3),
        lambda: co.select(back, 3),
        lambda: co.laplace(back, co.linalg.Diagonal(lin.theta.abs()), 1.0),
    ):
        assert "needs the training points: pass them" in refusal(work)
    x = normal(3, 4, seed=7)
    assert torch.equal(back.jacobian(x) @ back.theta, lin.jacobian(x) @ lin.theta)
    twin = copy.deepcopy(back)
    assert torch.equal(twin.jacobian(x) @ back.theta, back.jacobian(x) @ back.theta)
    single = back.cast(torch.float32)
    assert torch.equal(single.predict(x), lin.cast(torch.float32).predict(x)) and str(single.plan)


def test_only_two_inputs_of_the_data_are_kept_or_those_given(tmp_path):
    _, lin = linearised()
    post, mine = laplace(lin, co.KFAC), normal(1, 4, seed=5)
    for given, kept in ((None, data()[0][:2]), (mine, mine), (normal(9, 4), normal(9, 4)[:2])):
        post.save(tmp_path / "p", inputs=given)
        _, tree = storage.load(tmp_path / "p", "posterior", 1)
        assert torch.equal(tree["linearization"]["tried"]["inputs"], kept)
    assert "shape" in refusal(post.save, tmp_path / "p", inputs=normal(2, 3))


# Models


def test_another_model_is_refused_by_name(tmp_path):
    model, lin = linearised()
    path = tmp_path / "p"
    laplace(lin, co.KFAC).save(path)

    def changed(change):
        twin = copy.deepcopy(model)
        change(twin)
        return refusal(co.load, path, twin)

    def nudge(twin):
        with torch.no_grad():
            twin[2].bias[1] += 1e-14

    assert "other values than when it was saved in 1 of 4 tensors: '2.bias'" in changed(nudge)
    assert "in 4 of 4 tensors: '0.weight', '0.bias'" in refusal(co.load, path, net(seed=1))
    assert "lacks '0.bias', and also has nothing" in changed(lambda m: setattr(m[0], "bias", None))
    assert "also has 'more'" in changed(lambda m: m.register_buffer("more", torch.ones(1)))
    assert "another shape of '2.weight', '2.bias' ('2.weight': [3, 3], here [2, 3])" in refusal(
        co.load, path, net(outputs=2)
    )
    assert "another dtype of '0.weight'" in changed(lambda m: m.float())
    assert "('0.weight': torch.float64, here torch.float32)" in changed(lambda m: m.float())
    assert "other outputs" in refusal(co.load, path, renamed(net(activation=nn.ReLU), model))
    assert "model must be an nn.Module or a pair" in refusal(co.load, path, model.state_dict())
    dropped = nn.Sequential(model[0], nn.Tanh(), model[2], nn.Dropout())
    assert "train mode" in refusal(co.load, path, dropped.train())
    co.load(path, dropped.eval())  # computes the same


def test_arguments_of_another_kind_are_refused(tmp_path, annotations_unchecked):
    model, lin = linearised()
    post, path = laplace(lin, co.KFAC), tmp_path / "p"
    post.save(path)
    assert "path must be the path of a folder, a str or a Path, got Sequential" in refusal(co.load, model, path)
    assert "path must be" in refusal(post.save, None)
    assert "model must be an nn.Module or a pair" in refusal(co.load, path, str(path))
    assert "No likelihood for" in refusal(co.load, path, model, likelihood=3)
    assert "memory_budget must not be negative, got -1" in refusal(co.load, path, model, memory_budget=-1)
    assert "progress must be" in refusal(co.load, path, model, progress="yes")
    assert "cannot be read" in refusal(co.load, path, model, 3)


def renamed(other, model):
    other.load_state_dict(model.state_dict())
    return other


def test_weights_that_were_trained_further_are_kept_beside_the_posterior(tmp_path):
    model, lin = linearised()
    post, x = laplace(lin, co.KFAC), normal(3, 4, seed=7)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)
    post.save(tmp_path / "p")
    assert "load_weights=True" in refusal(co.load, tmp_path / "p", model)
    assert_same(answers(post, x), answers(co.load(tmp_path / "p", model, load_weights=True), x))
    assert_same([post.mean], [nn.utils.parameters_to_vector(model.parameters())])
    assert_same(answers(post, x), answers(co.load(tmp_path / "p", model), x))


def test_saved_weights_are_loaded_into_an_untrained_model(tmp_path):
    """For a posterior, an operator and a subnetwork, and for the parameters of a function; in place."""
    model, lin = linearised()
    post, x = laplace(lin, co.KFAC), normal(3, 4, seed=7)
    post.save(tmp_path / "p")
    fresh = net(seed=1).requires_grad_(False)
    weight = fresh[0].weight
    assert_same(answers(post, x), answers(co.load(tmp_path / "p", fresh, load_weights=True), x))
    assert weight is fresh[0].weight and torch.equal(weight, model[0].weight)
    named = {name: p.clone() for name, p in net(seed=2).named_parameters()}
    function = partial(torch.func.functional_call, model)
    found = co.load(tmp_path / "p", (function, named), load_weights=True)
    torch.testing.assert_close(found.predict(x).mean, post.predict(x).mean)
    co.save(co.DiagonalGGN(lin), tmp_path / "op", lin)
    assert_same([co.DiagonalGGN(lin).to_dense()], [co.load(tmp_path / "op", net(seed=3), load_weights=True).to_dense()])
    _, part = linearised(parameters=torch.tensor([24, 3, 17, 8]))
    laplace(part, co.DiagonalGGN).save(tmp_path / "part")
    with torch.no_grad():
        fresh[0].weight.add_(1.0)  # contains a chosen entry
    assert_same([part.predict(x)], [co.load(tmp_path / "part", fresh, load_weights=True).lin.predict(x)])


def test_a_model_that_differs_in_more_than_the_saved_weights_is_unchanged(tmp_path):
    _, lin = linearised(parameters="2.*")
    laplace(lin, co.KFAC).save(tmp_path / "p")
    other = net(seed=1)
    before = copy.deepcopy(other.state_dict())
    message = refusal(co.load, tmp_path / "p", other, load_weights=True)
    assert "in 2 of 4 tensors: '0.weight', '0.bias'. Load the weights" in message
    assert_same(before.values(), other.state_dict().values())
    assert "another shape of '2.weight'" in refusal(co.load, tmp_path / "p", net(outputs=2), load_weights=True)
    assert "another dtype" in refusal(co.load, tmp_path / "p", net().float(), load_weights=True)


def test_frozen_weights_and_buffers_are_compared_too(tmp_path):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(4, 3).double(), nn.Linear(3, 3).double()
            self.register_buffer("scale", torch.ones(3, dtype=DOUBLE))
            self.register_buffer("table", torch.arange(3), persistent=False)

        def forward(self, x):
            return self.head((self.body(x) * self.scale).tanh())

    model = Scaled().eval()
    path, x = tmp_path / "p", normal(3, 4, seed=7)
    post = laplace(co.linearize(model, data(), "classification", parameters="head.*"), co.KFAC)
    post.save(path)
    with torch.no_grad():
        twin = copy.deepcopy(model)
        twin.table += 1  # the model computes it itself, and no file of weights restores it
        assert_same(answers(post, x), answers(co.load(path, twin), x))
        twin.scale += 1
        assert "'scale'" in refusal(co.load, path, twin)
        twin = copy.deepcopy(model)
        twin.body.weight += 1
        assert "'body.weight'" in refusal(co.load, path, twin)


SELECTIONS = {"glob": "2.*", "last_layer": "last_layer", "index": torch.tensor([24, 3, 17, 8]), "predicate": None}


@pytest.mark.parametrize("name", SELECTIONS)
def test_a_selection_comes_back(name, tmp_path):
    chosen = (lambda n, t: "weight" in n) if name == "predicate" else SELECTIONS[name]
    model, lin = linearised(parameters=chosen)
    curvature = co.DiagonalGGN if name == "index" else co.KFAC
    post, x = laplace(lin, curvature), normal(3, 4, seed=7)
    model.requires_grad_(False)  # what requires a gradient at loading does not matter
    back = round_trip(post, tmp_path / "p", model)
    assert_same(answers(post, x), answers(back, x))
    with_data = laplace(co.load(tmp_path / "p", model, data()).lin)
    assert_same([laplace(lin).predict(x).variance], [with_data.predict(x).variance])


def test_a_subnetwork_block_of_the_whole_network_comes_back(tmp_path):
    model, whole = linearised()
    index = torch.tensor([2, 5, 20])
    post = laplace(co.linearize(model, data(), "classification", parameters=index), co.Subnetwork(co.GGN(whole), index))
    x = normal(3, 4, seed=7)
    assert_same(answers(post, x), answers(round_trip(post, tmp_path / "p", model), x))


@pytest.mark.parametrize(
    "name", ["mapping_inputs", "tuple_inputs", "function_pair", "tied_embedding", "resnet_batchnorm"]
)
def test_models_of_every_kind(name, tmp_path):
    model, inputs = ZOO[name].build()
    targets = call(model, inputs).detach() + 0.1
    post = laplace(co.linearize(model, (inputs, targets), Gaussian(0.3)), co.EKFAC)
    twin, _ = ZOO[name].build()
    if isinstance(twin, tuple):
        twin = twin[0], dict(reversed(twin[1].items()))  # names, not their order, are what counts
    back = round_trip(post, tmp_path / "p", twin, (inputs, targets) if name == "mapping_inputs" else None)
    x = points(inputs, slice(1, 4))
    assert_same(answers(post, x), answers(back, x))


def test_a_linearisation_that_was_cast(tmp_path):
    """The data's fingerprint is that of the dtype they came in."""
    model, lin = linearised(torch.float32)
    lin, x = lin.cast(DOUBLE), normal(3, 4, seed=7)
    post = laplace(lin)
    back = round_trip(post, tmp_path / "p", copy.deepcopy(model).double(), data(torch.float32))
    assert_same(answers(post, x), answers(back, x))
    assert "torch.float64, here torch.float32" in refusal(co.load, tmp_path / "p", model, data(torch.float32))


# Likelihoods

CLASSES = torch.arange(12) % 3
LIKELIHOODS = {
    "gaussian": (Gaussian(torch.tensor([0.1, 0.2, 0.3])), normal(12, 3)),
    "bernoulli": (co.likelihoods.Bernoulli(torch.tensor([1.0, 2.0, 3.0]), torch.tensor(0.5)), (normal(12, 3) > 0)),
    "categorical": (co.likelihoods.Categorical(torch.tensor([1.0, 2.0, 3.0]), 2, 0.1), CLASSES),
    "poisson": (co.likelihoods.Poisson(), CLASSES.unsqueeze(1).expand(12, 3)),
    "cross-entropy": (nn.CrossEntropyLoss(ignore_index=1), CLASSES),
    "squares": (nn.MSELoss(), normal(12, 3)),
    "positions in rows": (co.likelihoods.Sequences(Gaussian(0.1), 3, 1), normal(12, 3, 1)),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_a_likelihood_comes_back(name, tmp_path):
    likelihood, y = LIKELIHOODS[name]
    model, x = net(), data()[0]
    post = laplace(co.linearize(model, (x, y), likelihood), co.KFAC)
    back, test = round_trip(post, tmp_path / "p", model), normal(3, 4, seed=7)
    assert_same(answers(post, test), answers(back, test))
    assert repr(back.lin.likelihood) == repr(post.lin.likelihood) and back.lin.source == post.lin.source
    scores = [
        each.log_likelihood(test, y[:3], generator=torch.Generator().manual_seed(0)).value for each in (post, back)
    ]
    assert_same(scores[:1], scores[1:])
    assert co.load(tmp_path / "p", model, (x, y), likelihood).lin.source == post.lin.source
    assert "leave it out" in refusal(
        co.load, tmp_path / "p", model, likelihood=co.likelihoods.HeteroscedasticGaussian()
    )


@pytest.mark.parametrize("of_torch", [True, False])
def test_sequences_come_back(of_torch, tmp_path):
    """Torch's cross-entropy has the classes at dimension 1, our likelihoods have them last."""
    model = nn.Conv1d(2, 3, 2).double()
    x, y = normal(4, 2, 5), torch.arange(16).view(4, 4) % 3
    model = model if of_torch else nn.Sequential(model, Applied(lambda f: f.movedim(1, -1)))
    lin = co.linearize(model, (x, y), nn.CrossEntropyLoss() if of_torch else "classification")
    post, test = laplace(lin, co.KFAC), normal(2, 2, 5, seed=7)
    post.save(tmp_path / "p")
    for back in (co.load(tmp_path / "p", model), co.load(tmp_path / "p", model, (x, y))):
        assert_same(answers(post, test), answers(back, test))
        assert back.lin.output_shape == (4, 3)


def double_exponential(f):
    return DoubleExponential(f, 1.0)


def test_a_likelihood_of_ones_own_is_given_again(tmp_path):
    model, x, y = net(), data()[0], normal(12, 3)
    post = laplace(co.linearize(model, (x, y), double_exponential), co.EmpiricalFisher)
    post = laplace(post.lin, co.linalg.Diagonal(post.curvature.diagonal()))
    path, test = tmp_path / "p", normal(3, 4, seed=7)
    post.save(path)
    back = co.load(path, model, likelihood=double_exponential)
    assert torch.equal(back.predict(test).variance, post.predict(test).variance)
    assert back.log_evidence().value == post.log_evidence().value
    message = refusal(co.load, path, model)
    assert "FromDistribution(double_exponential), cannot be saved" in message
    wider = lambda f: DoubleExponential(f, 2.0)  # noqa: E731
    assert "is not that of the saved posterior" in refusal(co.load, path, model, likelihood=wider)


def test_what_the_library_has_can_be_saved():
    """A field, likelihood or operator that is added must be added to the records, too, or be known not to be one."""
    kept = {"lin", "curvature", "prior", "cache", "temperature", "prior_error"}
    assert {field.name for field in dataclasses.fields(co.posterior.Laplace)} == kept | {
        "tuning"
    }  # how it was found, not what
    given_again = {"FromDistribution", "FromLoss", "Likelihood"}
    kinds = {name for name in likelihoods.__all__ if isinstance(getattr(likelihoods, name), type)}
    assert kinds == set(network_record.STORED) | given_again | {"RewardPairs"}  # a model
    not_of_weights = {"Gradients", "Jacobian", "TangentKernel", "BlockRows", "Operator"}
    stored = operator_record.TENSOR_OPERATORS.keys() | operator_record.DATA_OPERATORS.keys()
    for room in (co, co.linalg):
        operators = {name for name in room.__all__ if is_operator(getattr(room, name))}
        assert operators <= stored | not_of_weights


def is_operator(thing):
    return isinstance(thing, type) and issubclass(thing, co.linalg.Operator)


# Files and operators


def test_a_posterior_saved_by_the_first_version_is_read(tmp_path):
    """The folder beside this file was written when the format was new; later versions read it, too."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(((torch.arange(p.numel()) + i) % 7 - 3).view_as(p) / 8)
    x, y = torch.arange(12.0).view(6, 2) / 8, torch.arange(6) % 2
    path = pathlib.Path(__file__).parent / "saved_by_version_1"
    post = laplace(co.linearize(model, (x, y), "classification"), co.KFAC, {"0.*": 1.0, "2.*": 2.0}, temperature=0.5)
    for back in (co.load(path, model), co.load(path, model, (x, y))):
        torch.testing.assert_close(back.predict(x).variance, post.predict(x).variance)
        torch.testing.assert_close(back.log_evidence().value, post.log_evidence().value)
        assert back.temperature == 0.5 and back.mode_gap == pytest.approx(post.mode_gap, rel=1e-4)


def _low_rank(lin):
    return co.low_rank(co.GGN(lin), 4, generator=torch.Generator().manual_seed(0))


# name: (operator, whether it needs the data)
OPERATORS = {
    "KFAC": (co.KFAC, False),
    "EKFAC": (co.EKFAC, False),
    "diagonal": (co.DiagonalGGN, False),
    "blocks": (co.BlockDiagonal, False),
    "low rank": (_low_rank, False),
    "damped": (lambda lin: co.KFAC(lin).add_diagonal(0.5), False),
    "inverse": (lambda lin: _low_rank(lin).add_diagonal(0.5).inverse(), False),
    "sum": (lambda lin: 0.5 * co.KFAC(lin) + co.DiagonalGGN(lin), False),
    "dense": (lambda lin: co.linalg.Dense(co.GGN(lin).to_dense(), psd=True), False),
    "GGN": (co.GGN, True),
    "Monte-Carlo Fisher": (
        lambda lin: co.GGN(lin, mc_samples=2, generator=torch.Generator().manual_seed(0)),
        True,
    ),
    "empirical Fisher": (co.EmpiricalFisher, True),
    "Hessian": (co.Hessian, True),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_alone_comes_back_with_its_bits(name, tmp_path):
    make, needs_data = OPERATORS[name]
    model, lin = linearised()
    operator, V = make(lin), normal(lin.num_parameters, 3)
    co.save(operator, tmp_path / "operator", lin)
    if needs_data:
        with pytest.raises(ValueError, match=r"walks over the training points: pass them, co.load\(path, model, data"):
            co.load(tmp_path / "operator", model)
    again = co.load(tmp_path / "operator", model, data() if needs_data else None)
    assert type(again) is type(operator)
    assert torch.equal(again @ V, operator @ V)
    if name in ("KFAC", "low rank", "GGN"):  # it is known whose it is: the posterior of the same network and data
        posts = [laplace(linearised()[1], each, 2.0) for each in (again, operator)]
        torch.testing.assert_close(*(post.log_evidence().value for post in posts), rtol=1e-12, atol=0)


def test_an_operator_of_something_else_is_refused_by_name(tmp_path, annotations_unchecked):
    model, lin = linearised()
    kfac, folder = co.KFAC(lin), tmp_path / "operator"
    co.save(kfac, folder, lin)
    refused = {
        "a posterior": (
            lambda: co.save(laplace(lin), folder, lin),
            TypeError,
            r"to save a posterior, use post.save\(path\)",
        ),
        "no linearisation": (
            lambda: co.save(kfac, folder, model),
            TypeError,
            "the linearisation of the operator",
        ),
        "another size": (lambda: co.save(lin.jacobian(), folder, lin), ValueError, "shape"),
        "other weights": (
            lambda: co.save(co.KFAC(co.linearize(net(seed=3), data(), "classification")), folder, lin),
            ValueError,
            "do not fit together",
        ),
        "over a posterior": (lambda: laplace(lin, co.KFAC).save(folder), FileExistsError, "holds 'operator'"),
        "another model": (lambda: co.load(folder, net(seed=3)), ValueError, "weight"),
        "nothing": (lambda: co.load(tmp_path / "nothing", model), FileNotFoundError, "nothing was saved"),
    }
    for attempt, error, message in refused.values():
        with pytest.raises(error, match=message):
            attempt()
    assert torch.equal(co.load(folder, model).to_dense(), kfac.to_dense())
