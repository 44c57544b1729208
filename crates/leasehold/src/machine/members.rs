//! The members of a name, by id: a hash table with chains.
//!
//! Most lookups are for ids that were minted one after the other, and most ids are removed soon after they were added.
//! So the entries lie in one array whose free places are reused, and only the heads of the chains are hashed. Adding
//! and removing a member moves no other entry, however long the queue is.

use std::fmt;

use crate::AcquisitionId;

/// Marks the end of a chain. It is never the index of an entry.
const END: u32 = u32::MAX;

/// The number of consecutive ids whose heads share a cache line.
const ROW: u64 = 8;

/// A map from acquisition ids to members.
#[cfg_attr(test, derive(Clone))]
pub(super) struct Members<V> {
    /// The first entry of each chain. The length is zero at first, then a power of two, and never less than the number
    /// of members.
    heads: Vec<u32>,
    /// How far the hash of a row is shifted right to get the index of a row of heads.
    shift: u32,
    entries: Vec<Entry<V>>,
    /// The first free entry. The other free entries follow it like a chain.
    free: u32,
    len: usize,
}

#[cfg_attr(test, derive(Clone))]
struct Entry<V> {
    id: AcquisitionId,
    /// `None` while the entry is free.
    value: Option<V>,
    next: u32,
}

impl<V> Default for Members<V> {
    fn default() -> Self {
        Self { heads: Vec::new(), shift: u64::BITS - 1, entries: Vec::new(), free: END, len: 0 }
    }
}

impl<V> Members<V> {
    #[inline]
    pub(super) fn get(&self, id: &AcquisitionId) -> Option<&V> {
        let entry = self.entries.get(self.find(*id)?)?;
        entry.value.as_ref()
    }

    #[inline]
    pub(super) fn get_mut(&mut self, id: &AcquisitionId) -> Option<&mut V> {
        let at = self.find(*id)?;
        self.entries.get_mut(at)?.value.as_mut()
    }

    /// Adds a member whose id is not in the map yet.
    #[inline(always)]
    #[allow(clippy::inline_always)] // otherwise the member is copied once more
    pub(super) fn insert(&mut self, id: AcquisitionId, value: V) {
        debug_assert!(self.find(id).is_none(), "{id} is known");
        // In two steps, so that the compiler writes the member directly to its final place. Copying a member costs more
        // than the search.
        let free = self.link(id);
        // It always is. But the compiler does not know that there is nothing to drop first.
        if free.is_none() {
            *free = Some(value);
        }
    }

    #[inline]
    pub(super) fn remove(&mut self, id: &AcquisitionId) -> Option<V> {
        self.unlink(*id)?.take()
    }

    /// Adds a free entry to the chain of `id`. Returns its value, which is `None`.
    fn link(&mut self, id: AcquisitionId) -> &mut Option<V> {
        if self.len == self.heads.len() {
            self.grow();
        }
        self.len += 1;
        let head = self.head(id);
        let mut at = self.free;
        if let Some(entry) = self.entries.get(at as usize) {
            self.free = entry.next;
        } else {
            at = index(self.entries.len());
            self.entries.push(Entry { id, value: None, next: END });
        }
        let next = std::mem::replace(&mut self.heads[head], at);
        let entry = &mut self.entries[at as usize];
        (entry.id, entry.next) = (id, next);
        &mut entry.value
    }

    /// Removes the entry of `id` from its chain. Returns its value, which the caller must take.
    fn unlink(&mut self, id: AcquisitionId) -> Option<&mut Option<V>> {
        let head = self.head(id);
        let (mut at, mut before) = (*self.heads.get(head)?, END);
        let next = loop {
            let entry = self.entries.get(at as usize)?;
            if entry.id == id {
                break entry.next;
            }
            before = at;
            at = entry.next;
        };
        match self.entries.get_mut(before as usize) {
            Some(before) => before.next = next,
            None => self.heads[head] = next,
        }
        self.len -= 1;
        let entry = self.entries.get_mut(at as usize)?;
        entry.next = std::mem::replace(&mut self.free, at);
        Some(&mut entry.value)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&AcquisitionId, &V)> {
        self.entries.iter().filter_map(|entry| Some((&entry.id, entry.value.as_ref()?)))
    }

    pub(super) fn into_values(self) -> impl Iterator<Item = V> {
        self.entries.into_iter().filter_map(|entry| entry.value)
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    #[inline]
    fn find(&self, id: AcquisitionId) -> Option<usize> {
        let mut at = *self.heads.get(self.head(id))?;
        loop {
            let entry = self.entries.get(at as usize)?;
            if entry.id == id {
                return Some(at as usize);
            }
            at = entry.next;
        }
    }

    /// Consecutive ids have neighbouring heads. Rows of heads are spread by hashing. Several names used in turn get ids
    /// at a regular distance, and these must not end up in a few chains.
    #[inline]
    fn head(&self, id: AcquisitionId) -> usize {
        let number = id.number();
        let row = (number / ROW).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift;
        // The result is less than the number of heads, which is a `usize`.
        usize::try_from(row * ROW + number % ROW).unwrap_or_default()
    }

    #[cold]
    fn grow(&mut self) {
        let heads = (2 * self.heads.len()).max(16);
        self.heads.clear();
        self.heads.resize(heads, END);
        self.shift = u64::BITS - (heads as u64 / ROW).ilog2();
        // There are as many entries as there ever were members at once. That maximum is reached now, so no entry is
        // free.
        for at in 0..self.entries.len() {
            let head = self.head(self.entries[at].id);
            self.entries[at].next = std::mem::replace(&mut self.heads[head], index(at));
        }
    }
}

fn index(at: usize) -> u32 {
    u32::try_from(at).ok().filter(|at| *at < END).expect("a name has fewer than 2^32 members")
}

impl<V> std::ops::Index<&AcquisitionId> for Members<V> {
    type Output = V;

    fn index(&self, id: &AcquisitionId) -> &V {
        self.get(id).expect("the id is a member's")
    }
}

impl<V: fmt::Debug> fmt::Debug for Members<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

#[cfg(test)]
impl<V> Members<V> {
    pub(super) fn len(&self) -> usize {
        self.len
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::Members;
    use crate::{AcquisitionId, ClientId};

    fn id(client: u64, sequence: u64) -> AcquisitionId {
        AcquisitionId::new(ClientId::from_bits(client), sequence)
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn members_are_a_map(steps in vec((any::<bool>(), 1..3_u64, 0..60_u64), 1..400)) {
            let (mut members, mut plain) = (Members::default(), BTreeMap::new());
            for (number, (add, client, sequence)) in steps.into_iter().enumerate() {
                let id = id(client, sequence * 16);
                if add && !plain.contains_key(&id) {
                    members.insert(id, number);
                    plain.insert(id, number);
                } else {
                    prop_assert_eq!(members.remove(&id), plain.remove(&id));
                }
                prop_assert_eq!(members.len(), plain.len());
                prop_assert_eq!(members.get(&id), plain.get(&id));
                prop_assert_eq!(members.get_mut(&id), plain.get_mut(&id));
                let all: BTreeMap<_, _> = members.iter().map(|(id, number)| (*id, *number)).collect();
                prop_assert_eq!(&all, &plain);
            }
            for (id, number) in &plain {
                prop_assert_eq!(members.get(id), Some(number));
            }
        }
    }

    /// Chains stay short in a queue of ten thousand waiters, whatever the regular distance between their ids.
    #[test]
    fn chains_are_short() {
        for distance in [1, 2, 3, 7, 8, 10, 64, 100, 1000, 1024, 4096, 1 << 20] {
            let mut members = Members::default();
            for number in 0..10_000 {
                members.insert(id(0x7d3f_92c1_0b5e_6a48, number * distance), ());
            }
            let chain = |head: &u32| {
                let next = |at: &u32| members.entries.get(*at as usize).map(|entry| entry.next);
                std::iter::successors(Some(*head), next).count() - 1
            };
            let longest = members.heads.iter().map(chain).max().unwrap_or_default();
            assert!(longest <= 24, "{longest} in a chain of ids that are {distance} apart");
        }
    }
}
