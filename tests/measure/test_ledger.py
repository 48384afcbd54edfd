from dtlayout.measure.ledger import Allocation, Category, Footprint, Ledger


def test_peak_shows_what_storages_turned_out_to_be_later():
    ledger, first, second = Ledger(), Allocation(), Allocation()
    ledger.set_bytes(first, 100)
    ledger.set_bytes(second, 50)
    ledger.set_bytes(second, 0)
    first.claim(Category.GRADIENT)
    assert ledger.peak == Footprint(gradient=100, other=50)
    assert ledger.current == Footprint(gradient=100)


def test_a_weaker_category_does_not_replace_a_stronger_one():
    allocation = Allocation()
    allocation.claim(Category.GRADIENT)
    allocation.claim(Category.ACTIVATION)
    assert allocation.category is Category.GRADIENT


def test_category_peaks_are_each_at_their_own_moment():
    ledger, first, second = Ledger(), Allocation(), Allocation()
    second.claim(Category.ACTIVATION)
    ledger.set_bytes(first, 100)
    ledger.set_bytes(first, 0)
    ledger.set_bytes(second, 60)
    assert ledger.category_peaks == Footprint(other=100, activation=60)
    assert ledger.peak == Footprint(other=100)


def test_a_new_window_keeps_the_peak_and_forgetting_drops_it():
    ledger, allocation = Ledger(), Allocation()
    ledger.set_bytes(allocation, 100)
    ledger.set_bytes(allocation, 30)
    ledger.begin_window()
    assert ledger.curve_bytes == [30]
    ledger.set_bytes(allocation, 40)
    assert ledger.curve_bytes == [30, 40]
    assert ledger.peak.total == ledger.peak_bytes == ledger.category_peaks.other == 100
    ledger.forget_peak()
    assert ledger.peak.total == ledger.peak_bytes == ledger.category_peaks.other == 40


def test_an_empty_ledger_reads_as_nothing():
    ledger = Ledger()
    assert ledger.peak == ledger.current == Footprint()
    assert ledger.curve_bytes == [0]
