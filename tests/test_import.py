def test_the_native_modules_load() -> None:
    import mempool._core
    import solvers._core
    import traces._core

    assert mempool._core.__doc__
    assert solvers._core.__doc__
    assert traces._core.__doc__
