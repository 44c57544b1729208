//! Sets of instants: sorted spans that do not touch. Each span includes its beginning and excludes its end.

use crate::clock::Micros;

pub(super) type Span = (Micros, Micros);

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Spans(Vec<Span>);

impl FromIterator<Span> for Spans {
    fn from_iter<I: IntoIterator<Item = Span>>(spans: I) -> Self {
        let mut all: Vec<_> = spans.into_iter().filter(|(from, to)| from < to).collect();
        all.sort_unstable();
        let mut merged: Vec<Span> = Vec::with_capacity(all.len());
        for (from, to) in all {
            match merged.last_mut() {
                Some((_, end)) if *end >= from => *end = to.max(*end),
                _ => merged.push((from, to)),
            }
        }
        Self(merged)
    }
}

impl Spans {
    pub(super) fn iter(&self) -> impl Iterator<Item = Span> + '_ {
        self.0.iter().copied()
    }

    /// The spans that overlap this span.
    fn overlapping(&self, (from, to): Span) -> impl Iterator<Item = Span> + '_ {
        let first = self.0.partition_point(move |(_, end)| *end <= from);
        self.0[first..].iter().copied().take_while(move |(begin, _)| *begin < to)
    }

    pub(super) fn meets(&self, span: Span) -> bool {
        self.overlapping(span).next().is_some()
    }

    /// The end of the last span that overlaps this span.
    pub(super) fn end_of(&self, span: Span) -> Option<Micros> {
        self.overlapping(span).last().map(|(_, end)| end)
    }

    /// The parts of this span that are in the set.
    pub(super) fn within(&self, (from, to): Span) -> Vec<Span> {
        self.overlapping((from, to)).map(|(b, e)| (b.max(from), e.min(to))).collect()
    }

    /// The parts of this span that are not in the set.
    pub(super) fn without(&self, (from, to): Span) -> Vec<Span> {
        let mut rest = Vec::new();
        let mut at = from;
        for (begin, end) in self.overlapping((from, to)) {
            if at < begin {
                rest.push((at, begin));
            }
            at = at.max(end);
        }
        if at < to {
            rest.push((at, to));
        }
        rest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_merged_and_taken_away() {
        let spans: Spans = [(5, 9), (1, 3), (2, 4), (9, 10), (20, 20)].into_iter().collect();
        assert_eq!(spans.0, [(1, 4), (5, 10)]);
        assert_eq!(spans.without((0, 12)), [(0, 1), (4, 5), (10, 12)]);
        assert_eq!(spans.within((3, 6)), [(3, 4), (5, 6)]);
        assert!(spans.meets((3, 5)));
        assert!(!spans.meets((4, 5)));
        assert_eq!(spans.end_of((3, 6)), Some(10));
        assert_eq!(spans.end_of((4, 5)), None);
        assert_eq!(spans.without((6, 7)), []);
    }
}
