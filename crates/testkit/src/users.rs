//! The users of a Redis server that docs/guarantees.md recommends, exactly as it spells them.

/// The page with their lines.
const PAGE: &str = include_str!("../../../docs/guarantees.md");

/// What is put in the place of the password there.
pub const PASSWORD: &str = "a password for tests";

/// The arguments of each line that adds a user.
///
/// # Panics
/// If the page has another number of lines than two.
#[must_use]
pub fn lines() -> Vec<Vec<String>> {
    let lines = PAGE.lines().filter(|line| line.starts_with("ACL SETUSER "));
    let words = |line: &str| {
        line.split(' ').map(|word| word.replace("PASSWORD", PASSWORD)).collect::<Vec<_>>()
    };
    let lines: Vec<_> = lines.map(words).collect();
    assert_eq!(lines.len(), 2, "one user to share, one to read");
    lines
}

/// Adds `leasehold` and `leasehold-reader`.
///
/// # Panics
/// If the server does not understand a line.
pub fn add_users(connection: &mut redis::Connection) {
    for line in lines() {
        let mut command = redis::cmd(&line[0]);
        command.arg(&line[1..]);
        command.exec(connection).unwrap_or_else(|error| panic!("{line:?}: {error}"));
    }
}
