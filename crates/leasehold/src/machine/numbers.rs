//! Slot numbers. A permit that asks for one gets the lowest free number, starting at 1. Most permits ask for none, so
//! the functions are marked cold.

use std::num::NonZeroU32;

/// The slot numbers in use.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone, PartialEq))]
pub(super) struct Numbers {
    /// One bit for each number, starting at 1. The last word is never 0.
    taken: Vec<u64>,
}

impl Numbers {
    #[cold]
    pub(super) fn lowest_free(&self) -> NonZeroU32 {
        if crate::broken::is("slots") {
            return NonZeroU32::MIN;
        }
        let word = self.taken.iter().position(|word| *word != u64::MAX).unwrap_or(self.taken.len());
        let bit = self.taken.get(word).map_or(0, |word| word.trailing_ones());
        // There are no more numbers in use than holders, so this fits in a `u32`.
        let word = u32::try_from(word).unwrap_or(u32::MAX / 64 - 1);
        NonZeroU32::MIN.saturating_add(word * 64 + bit)
    }

    #[cold]
    pub(super) fn take(&mut self, number: NonZeroU32) {
        let (word, bit) = place(number);
        if word == self.taken.len() {
            self.taken.push(0);
        }
        self.taken[word] |= bit;
    }

    #[cold]
    pub(super) fn free(&mut self, number: NonZeroU32) {
        let (word, bit) = place(number);
        if let Some(taken) = self.taken.get_mut(word) {
            *taken &= !bit;
        }
        while self.taken.last() == Some(&0) {
            self.taken.pop();
        }
    }
}

fn place(number: NonZeroU32) -> (usize, u64) {
    let at = number.get() - 1;
    ((at / 64) as usize, 1 << (at % 64))
}
