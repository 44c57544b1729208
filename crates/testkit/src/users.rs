//! The Redis users that docs/guarantees.md recommends, read from that page.

/// The page that contains the `ACL SETUSER` lines.
const PAGE: &str = include_str!("../../../docs/guarantees.md");

/// Replaces the placeholder for the password in those lines.
pub const PASSWORD: &str = "a password for tests";

/// Returns the arguments of each line that adds a user.
///
/// # Panics
/// If the page does not have two such lines.
#[must_use]
pub fn lines() -> Vec<Vec<String>> {
    let lines = PAGE.lines().filter(|line| line.starts_with("ACL SETUSER "));
    let words = |line: &str| {
        line.split(' ').map(|word| word.replace("PASSWORD", PASSWORD)).collect::<Vec<_>>()
    };
    let lines: Vec<_> = lines.map(words).collect();
    assert_eq!(lines.len(), 2, "one user that shares, one that reads");
    lines
}

/// Adds `leasehold` and `leasehold-reader`.
///
/// # Panics
/// If the server refuses a line.
pub fn add_users(connection: &mut redis::Connection) {
    for line in lines() {
        let mut command = redis::cmd(&line[0]);
        command.arg(&line[1..]);
        command.exec(connection).unwrap_or_else(|error| panic!("{line:?}: {error}"));
    }
}
