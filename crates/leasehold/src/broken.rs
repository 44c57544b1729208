//! Rules that are broken on purpose, one at a time, to check that the tests notice.
//!
//! Each rule is broken where it is kept: in Rust by a line that calls [`is`], in the scripts by [`in_lua`], which changes
//! their text. A shipped build keeps all rules, because there `is` is constant. In a build with `--cfg leasehold_broken`,
//! which only the torture test makes, the environment variable `LEASEHOLD_BROKEN` names the rule to break. In a unit test
//! [`while_broken`](rules::while_broken) does.

#[cfg(any(test, leasehold_broken))]
mod rules;

#[cfg(leasehold_broken)]
pub use rules::RULES;
#[cfg(test)]
#[allow(unused_imports)] // not every set of features has a test that breaks a rule
pub(crate) use rules::{IN_LUA, while_broken};
#[cfg(any(test, leasehold_broken))]
pub(crate) use rules::{in_lua, is};

/// Returns whether this rule is the one to break.
#[cfg(not(any(test, leasehold_broken)))]
#[inline(always)]
#[allow(clippy::inline_always)] // so that the broken branches are removed
pub(crate) const fn is(_rule: &str) -> bool {
    false
}

/// Returns this part of a script, changed so that the rule to break is broken.
#[cfg(all(feature = "redis", not(any(test, leasehold_broken))))]
pub(crate) fn in_lua(part: String) -> String {
    part
}
