"""Why these tests do not run, where they do not: one reason, with the remedy."""

from __future__ import annotations

from . import real


def checkout(folder):
    path = folder / "roll" / "pipeline" / "rlvr" / "rlvr_pipeline.py"
    path.parent.mkdir(parents=True)
    path.touch()
    return {"QREWARD_ROLL_SRC": str(folder)}


def test_without_a_checkout_the_variable_is_named():
    assert "QREWARD_ROLL_SRC is not set" in real.why_not({})
    assert "environment.sh" in real.why_not({})


def test_a_folder_that_is_no_checkout_is_named(tmp_path):
    reason = real.why_not({"QREWARD_ROLL_SRC": str(tmp_path)})
    assert str(tmp_path) in reason
    assert "is not a checkout of ROLL" in reason


def test_packages_that_do_not_fit_are_named_with_the_remedy(tmp_path, monkeypatch):
    class Metadata:
        PackageNotFoundError = real.metadata.PackageNotFoundError

        @staticmethod
        def version(name):
            if name == "ray":
                raise Metadata.PackageNotFoundError(name)
            return "2.4.6"

    monkeypatch.setattr(real, "metadata", Metadata)
    reason = real.why_not(checkout(tmp_path))
    assert "numpy<2,>=1.25 is 2.4.6" in reason
    assert "ray==2.48.0 is not there" in reason
    assert "environment.sh" in reason
