//! The queue of waiters.
//!
//! Every waiter that joins takes the next number as its place, so two that join in the same microsecond still have an
//! order. A waiter can leave from any place.

use std::collections::VecDeque;

use crate::AcquisitionId;

/// The waiters, in order. A waiter that leaves from the middle leaves a gap, so no other waiter moves. The gaps are
/// removed once they outnumber the waiters by more than 64, so leaving is cheap on average.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct Queue {
    /// Ordered by place. The first entry is never a gap.
    pub(super) places: VecDeque<(u64, Option<AcquisitionId>)>,
    len: usize,
}

impl Queue {
    /// Adds a waiter at a place behind all others.
    pub(super) fn join(&mut self, place: u64, id: AcquisitionId) {
        self.places.push_back((place, Some(id)));
        self.len += 1;
    }

    /// Frees a place that a waiter has. Call it once for each place.
    pub(super) fn leave(&mut self, place: u64) {
        self.len -= 1;
        if self.places.front().is_some_and(|(first, _)| *first == place) {
            self.places.pop_front();
        } else if let Ok(index) = self.index_of(place) {
            self.places[index].1 = None;
        }
        while self.places.front().is_some_and(|(_, id)| id.is_none()) {
            self.places.pop_front();
        }
        if self.places.len() > 2 * self.len + 64 {
            self.places.retain(|(_, id)| id.is_some());
        }
    }

    /// Returns the first waiter at this place or behind it.
    #[inline]
    pub(super) fn first_from(&self, place: u64) -> Option<(u64, AcquisitionId)> {
        let (first, id) = *self.places.front()?;
        if place <= first {
            return Some((first, id?));
        }
        let from = self.index_of(place).unwrap_or_else(|behind| behind);
        self.places.range(from..).find_map(|(place, id)| Some((*place, (*id)?)))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = AcquisitionId> {
        self.places.iter().filter_map(|(_, id)| *id)
    }

    /// Returns the number of waiters before this place.
    pub(super) fn before(&self, place: u64) -> usize {
        self.places.iter().take_while(|(at, _)| *at < place).filter(|(_, id)| id.is_some()).count()
    }

    /// Returns the last waiter, for a broken rule.
    pub(super) fn last(&self) -> Option<(u64, AcquisitionId)> {
        self.places.iter().rev().find_map(|(place, id)| Some((*place, (*id)?)))
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    fn index_of(&self, place: u64) -> Result<usize, usize> {
        self.places.binary_search_by_key(&place, |(at, _)| *at)
    }
}
