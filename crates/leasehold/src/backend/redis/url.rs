//! Parses the URLs of Redis deployments.
//!
//! Everything in a URL must be known: a typing error must not lead to another database without notice. No error repeats
//! a part of the URL that may belong to a password.

use std::net::Ipv6Addr;

use percent_encoding::percent_decode_str;

use super::deployment::{Endpoint, SentinelSettings, ServerSettings};
use crate::Error;

const CLUSTER: &str = "redis-cluster";
const SENTINEL: &str = "redis-sentinel";

/// Parses the URL of one server.
pub(super) fn server(url: &str) -> Result<ServerSettings, Error> {
    const EXPECTED: &str = "expected redis://[user[:password]@]host[:port][/database], rediss://… for TLS, or unix:///path";
    let invalid = |problem: &str| Error::invalid("url", format!("{problem}: {EXPECTED}"));
    let Some((scheme, rest)) = url.split_once("://") else {
        return Err(invalid("// is missing before the host"));
    };
    let parts = Parts::of(rest, 6379);
    let (is_socket, tls) = match scheme {
        "redis" | "valkey" => (false, false),
        "rediss" | "valkeys" => (false, true),
        "unix" | "redis+unix" | "valkey+unix" => (true, false),
        _ => return Err(invalid(DOES_NOT_PARSE)),
    };
    let problem = if is_socket {
        parts.parameter_problem(&["db", "user", "pass", "protocol"])
    } else {
        parts.problem(&["db", "protocol"]).or_else(|| parts.host_problem())
    };
    if let Some(problem) = problem {
        return Err(invalid(&problem));
    }
    match parts.fragment {
        None => {}
        Some("insecure") if tls => {
            return Err(invalid("certificates must be verified: remove #insecure"));
        }
        Some(_) => return Err(invalid("it must not contain #")),
    }
    if parts.hosts.len() > 1 {
        let problem = "it has several hosts; a single server has one";
        return Err(invalid(&format!("{problem}; use {CLUSTER}:// or {SENTINEL}://")));
    }
    let in_path = Some(parts.path).filter(|path| !is_socket && !path.is_empty());
    let database = match (in_path, parts.parameter("db")) {
        (Some(path), Some(parameter)) if path != parameter => {
            return Err(invalid("the path and the parameter db select different databases"));
        }
        (path, parameter) => path.or(parameter).map_or(Ok(0), database),
    };
    let database = database.map_err(|problem| invalid(&problem))?;
    // Other programs may choose the version of the protocol in the same URL. We need version 3.
    let known = [None, Some("2"), Some("3"), Some("resp2"), Some("resp3")];
    let settings = match &parts.hosts[..] {
        _ if !known.contains(&parts.parameter("protocol")) => None,
        _ if is_socket => parts.socket(database),
        [host, ..] => parts.server(host, tls, database),
        [] => None,
    };
    settings.ok_or_else(|| invalid(DOES_NOT_PARSE))
}

const DOES_NOT_PARSE: &str = "it does not parse";

fn database(text: &str) -> Result<u64, String> {
    match text.parse::<i64>() {
        Ok(database) => u64::try_from(database)
            .map_err(|_| format!("there is no database {database}; the first is 0")),
        // It is not repeated: it may be part of a password that contains a slash.
        Err(_) => Err("the database is not a number".to_owned()),
    }
}

/// The parts of `[user[:password]@]host[:port],…[/path][?parameters][#fragment]`.
struct Parts<'a> {
    credentials: &'a str,
    hosts: Vec<String>,
    path: &'a str,
    parameters: Vec<(&'a str, &'a str)>,
    fragment: Option<&'a str>,
}

impl<'a> Parts<'a> {
    fn of(rest: &'a str, port: u16) -> Self {
        let (rest, fragment) =
            rest.split_once('#').map_or((rest, None), |(rest, after)| (rest, Some(after)));
        let (rest, parameters) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (credentials, hosts) = authority.rsplit_once('@').unwrap_or(("", authority));
        let has_port =
            |host: &str| host.rsplit_once(']').map_or(host, |(_, rest)| rest).contains(':');
        let host = |host: &str| {
            if has_port(host) { host.to_owned() } else { format!("{host}:{port}") }
        };
        let parameters = parameters.split('&').filter(|pair| !pair.is_empty());
        Self {
            credentials,
            hosts: hosts.split(',').filter(|host| !host.is_empty()).map(host).collect(),
            path: path.trim_end_matches('/'),
            parameters: parameters.map(|pair| pair.split_once('=').unwrap_or((pair, ""))).collect(),
            fragment,
        }
    }

    /// Returns what is wrong with the parameters or the path, if anything. An unescaped `/`, `?` or `#` in the password
    /// ends the hosts too early. The text after it may be part of the password, so the message does not repeat it.
    fn problem(&self, known: &[&str]) -> Option<String> {
        let late = [self.path, self.fragment.unwrap_or_default()];
        if late.iter().any(|part| part.contains('@')) {
            return Some(late_at());
        }
        self.parameter_problem(known)
    }

    fn parameter_problem(&self, known: &[&str]) -> Option<String> {
        let mut names = self.parameters.iter().map(|(name, _)| *name);
        if let Some(unknown) = names.find(|name| !known.contains(name)) {
            let has_at = |(name, value): &(&str, &str)| name.contains('@') || value.contains('@');
            let is_late = self.parameters.iter().any(has_at);
            // It may be the rest of a password that contains a `&`.
            let follows_password = self
                .parameters
                .iter()
                .any(|(name, _)| known.contains(name) && name.contains("pass"));
            return Some(if is_late {
                late_at()
            } else if follows_password {
                "a parameter is unknown; write & in a password as %26".to_owned()
            } else {
                format!("the parameter {unknown:?} is unknown")
            });
        }
        let count = |name: &str| self.parameters.iter().filter(|(known, _)| *known == name).count();
        let twice = known.iter().find(|name| count(name) > 1)?;
        Some(format!("the parameter {twice:?} is given twice"))
    }

    /// Returns what is wrong with the hosts, if anything.
    fn host_problem(&self) -> Option<String> {
        if self.hosts.is_empty() {
            return Some("it has no host".to_owned());
        }
        let port = |host: &'_ String| Some(host.rsplit_once(':')?.1.to_owned());
        let mut ports = self.hosts.iter().filter_map(port);
        let bad = ports.find(|port| !port.parse::<u16>().is_ok_and(|port| port > 0))?;
        // What is not a number may be a password without its host.
        let is_number = bad.bytes().all(|byte| byte.is_ascii_digit());
        let bad = if is_number { format!("the port {bad}") } else { "the port".to_owned() };
        Some(format!("{bad} is not a number from 1 to 65535"))
    }

    fn unused_fragment(&self) -> Option<String> {
        self.fragment.map(|_| "it must not contain #".to_owned())
    }

    fn parameter(&self, name: &str) -> Option<&'a str> {
        self.parameters.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)
    }

    /// Returns the settings of the server at one of the hosts. `None` if a part of the URL is invalid.
    fn server(&self, host: &str, tls: bool, database: u64) -> Option<ServerSettings> {
        let (user, password) = self.credentials.split_once(':').unwrap_or((self.credentials, ""));
        let (host, port) = host.rsplit_once(':')?;
        let endpoint = Endpoint::Tcp { host: valid_host(host)?, port: port.parse().ok()?, tls };
        Some(ServerSettings {
            endpoint,
            user: decoded(user)?,
            password: decoded(password)?,
            database,
        })
    }

    /// Returns the settings of the server at a Unix socket. `None` if a part of the URL is invalid.
    fn socket(&self, database: u64) -> Option<ServerSettings> {
        let is_local = matches!(&self.hosts[..], []) && self.credentials.is_empty();
        let path = decoded(self.path).flatten().filter(|_| is_local)?;
        // Spaces are written as in the parameters of any URL.
        let parameter = |name| decoded(&self.parameter(name).unwrap_or_default().replace('+', " "));
        let endpoint = Endpoint::Unix(format!("/{path}").into());
        let (user, password) = (parameter("user")?, parameter("pass")?);
        Some(ServerSettings { endpoint, user, password, database })
    }
}

/// Decodes `%2F` and the like. An empty text counts as missing: `Some(None)`. Returns `None` if the text is not UTF-8.
#[allow(clippy::option_option)]
fn decoded(text: &str) -> Option<Option<String>> {
    let text = percent_decode_str(text).decode_utf8().ok()?.into_owned();
    Some(Some(text).filter(|text| !text.is_empty()))
}

/// Returns the host without the brackets of an IPv6 address. `None` if no server can have this address.
fn valid_host(host: &str) -> Option<String> {
    if let Some(address) = host.strip_prefix('[') {
        let address: Ipv6Addr = address.strip_suffix(']')?.parse().ok()?;
        return (!address.is_unspecified()).then(|| address.to_string());
    }
    let is_forbidden = |c: char| c.is_ascii_control() || " #/:<>?@[\\]^|".contains(c);
    let is_valid = !host.is_empty() && !host.contains(is_forbidden) && host != "0.0.0.0";
    is_valid.then(|| host.to_owned())
}

fn late_at() -> String {
    let problem = "there is an @ after the hosts";
    format!("{problem}; in a password, write %2F for /, %3F for ? and %23 for #")
}

/// Parses what follows `redis-cluster://`.
pub(super) fn cluster(tls: bool, rest: &str) -> Result<Vec<ServerSettings>, Error> {
    let expected = format!("expected {CLUSTER}://[user[:password]@]host[:port][,host[:port]…]");
    let parts = Parts::of(rest, 6379);
    let invalid = |problem: &str| Error::invalid("url", format!("{problem}: {expected}"));
    if let Some(problem) = parts.problem(&[]).or_else(|| parts.unused_fragment()) {
        return Err(invalid(&problem));
    }
    if !matches!(parts.path, "" | "0") {
        return Err(invalid("it selects a database; a cluster has only database 0"));
    }
    if let Some(problem) = parts.host_problem() {
        return Err(invalid(&problem));
    }
    let nodes = parts.hosts.iter().map(|host| parts.server(host, tls, 0));
    nodes.collect::<Option<_>>().ok_or_else(|| invalid(DOES_NOT_PARSE))
}

/// Parses what follows `redis-sentinel://`.
pub(super) fn sentinel(tls: bool, rest: &str) -> Result<SentinelSettings, Error> {
    const PARAMETERS: [&str; 3] = ["sentinel_user", "sentinel_password", "sentinel_tls"];
    let expected = format!(
        "expected {SENTINEL}://[user[:password]@]host[:port][,host[:port]…]/name of the primary[/database], with the \
         parameters sentinel_user, sentinel_password and sentinel_tls (yes or no), if the sentinels need them"
    );
    let invalid = |problem: &str| Error::invalid("url", format!("{problem}: {expected}"));
    let parts = Parts::of(rest, 26379);
    if let Some(problem) = parts.problem(&PARAMETERS).or_else(|| parts.unused_fragment()) {
        return Err(invalid(&problem));
    }
    let (service, database) = parts.path.split_once('/').unwrap_or((parts.path, "0"));
    if service.is_empty() {
        return Err(invalid("the name of the primary is missing"));
    }
    let Ok(database) = database.parse::<u32>() else {
        return Err(invalid("the database is not a number"));
    };
    if let Some(problem) = parts.host_problem() {
        return Err(invalid(&problem));
    }
    let sentinel_tls = match parts.parameter("sentinel_tls") {
        None => tls,
        Some("yes") => true,
        Some("no") => false,
        Some(other) => {
            return Err(invalid(&format!("sentinel_tls is {other:?}; it must be yes or no")));
        }
    };
    let parsed = || {
        let server = parts.server(&parts.hosts[0], tls, database.into())?;
        let credential = |name| decoded(parts.parameter(name).unwrap_or_default());
        let (user, password) = (credential("sentinel_user")?, credential("sentinel_password")?);
        let sentinel = |host: &String| {
            let (user, password) = (user.clone(), password.clone());
            Some(ServerSettings { user, password, ..parts.server(host, sentinel_tls, 0)? })
        };
        let sentinels = parts.hosts.iter().map(sentinel).collect::<Option<_>>()?;
        Some(SentinelSettings { sentinels, service: service.to_owned(), server })
    };
    parsed().ok_or_else(|| invalid(DOES_NOT_PARSE))
}

#[cfg(test)]
mod tests {
    use super::super::deployment::{Deployment, Endpoint, ServerSettings};

    fn server(url: &str) -> ServerSettings {
        match Deployment::parse(url) {
            Ok(Deployment::Server(settings)) => settings,
            other => panic!("{url}: {other:?}"),
        }
    }

    fn credentials(server: &ServerSettings) -> (Option<&str>, Option<&str>) {
        (server.user.as_deref(), server.password.as_deref())
    }

    fn problem(url: &str) -> String {
        let Err(error) = Deployment::parse(url) else { panic!("{url} parses") };
        error.to_string()
    }

    #[test]
    fn sentinels_and_servers_have_credentials_of_their_own() {
        let url = "rediss-sentinel://app:s%40cret@one:1,two,[::1]:3/mymaster/2?sentinel_user=watch&sentinel_password=p%26w&sentinel_tls=no";
        let parsed = Deployment::parse(url).unwrap();
        assert_eq!(parsed.address(), "rediss-sentinel://one:1,two:26379,[::1]:3/mymaster/2");
        let Deployment::Sentinel(settings) = parsed else { panic!("no sentinels") };
        assert_eq!(credentials(&settings.server), (Some("app"), Some("s@cret")));
        assert_eq!(settings.server.database, 2);
        assert!(settings.server.uses_tls());
        assert_eq!(credentials(&settings.sentinels[1]), (Some("watch"), Some("p&w")));
        assert_eq!(settings.sentinels[2].host_and_port(), ("::1".to_owned(), 3));
        assert!(!settings.sentinels[0].uses_tls());
    }

    #[test]
    fn a_cluster_is_reached_by_some_of_its_nodes() {
        let parsed = Deployment::parse("redis-cluster://:pw@one,two:7000").unwrap();
        assert_eq!(parsed.address(), "redis-cluster://one:6379,two:7000");
        let Deployment::Cluster(nodes) = parsed else { panic!("no cluster") };
        assert_eq!(credentials(&nodes[1]), (None, Some("pw")));
    }

    #[test]
    fn the_missing_part_of_a_url_is_named() {
        assert!(problem("redis-sentinel://one,two").contains("the name of the primary is missing"));
        assert!(problem("redis-sentinel://one/m/x").contains("the database is not a number"));
        assert!(
            problem("redis-sentinel://one/m?tls=1").contains("the parameter \"tls\" is unknown")
        );
        assert!(
            problem("redis-cluster://one/3")
                .contains("it selects a database; a cluster has only database 0")
        );
        assert!(problem("redis-cluster://").contains("it has no host"));
        assert!(!problem("redis-cluster://user:secret@host:99999").contains("secret"));
    }

    #[test]
    fn the_database_is_in_the_path_or_a_parameter() {
        let database = |url: &str| server(url).database;
        assert_eq!(database("redis://host"), 0);
        assert_eq!(database("redis://host?db=1"), 1);
        assert_eq!(database("redis://user:pass@host:1/?db=3&protocol=resp3"), 3);
        assert_eq!(database("rediss://host/2"), 2);
        assert_eq!(database("redis://host/2?db=2"), 2);
        assert_eq!(database("unix:///tmp/a@b.sock?db=4&pass=p@ss"), 4);
        assert_eq!(
            Deployment::parse("redis://host?db=1").unwrap().address(),
            "redis://host:6379/1"
        );
        assert!(problem("redis://host/2?db=3").contains("select different databases"));
        assert!(problem("redis://host?db=one").contains("the database is not a number"));
        assert!(problem("redis://host?db=1&db=2").contains("\"db\" is given twice"));
        assert!(problem("redis://host/-1").contains("there is no database -1; the first is 0"));
    }

    #[test]
    fn no_part_of_a_password_is_repeated() {
        for url in [
            "redis://:12/HIDDEN@host",
            "redis://user:12/HIDDEN",
            "redis://user%3A12/HIDDEN%40host",
            "redis://user:12/HIDDEN?protocol=3@host",
            "redis-cluster://user:1/HIDDEN",
            "redis-sentinel://host/name/HIDDEN",
            "redis-sentinel://host/name?sentinel_password=ab&HIDDEN",
            "unix:///socket?pass=ab&HIDDEN",
            "redis:HIDDEN@host",
        ] {
            let problem = problem(url);
            assert!(!problem.contains("HIDDEN"), "{url}: {problem}");
        }
    }

    #[test]
    fn what_has_no_meaning_is_refused() {
        assert!(problem("redis://host?timeout=5").contains("the parameter \"timeout\" is unknown"));
        assert!(problem("unix:///a?password=x").contains("the parameter \"password\" is unknown"));
        assert!(problem("redis://host?protocol=4").contains("it does not parse"));
        assert!(problem("redis://host#insecure").contains("it must not contain #"));
        assert!(problem("rediss://host#secure").contains("it must not contain #"));
        assert!(problem("rediss://host#insecure").contains("certificates must be verified"));
        assert!(problem("redis-cluster://host#insecure").contains("it must not contain #"));
        assert!(problem("redis://one,two").contains("use redis-cluster:// or redis-sentinel://"));
    }

    #[test]
    fn an_invalid_port_is_named() {
        for url in [
            "redis://a:99999",
            "rediss://u:p@[::1]:99999",
            "redis-cluster://a,b:99999",
            "redis-sentinel://a:99999/m",
        ] {
            let problem = problem(url);
            assert!(
                problem.contains("the port 99999 is not a number from 1 to 65535"),
                "{url}: {problem}"
            );
        }
        assert!(problem("redis://a:0").contains("the port 0 is not"));
        // A password without a host.
        assert!(!problem("redis://joe:secret").contains("secret"));
    }

    #[test]
    fn a_password_that_is_not_encoded_is_not_repeated() {
        for url in [
            "redis-cluster://joe:x/secret@host",
            "redis-cluster://joe:x?secret@host",
            "redis-cluster://joe:x?secret&y=z@host",
            "redis-cluster://joe:a@b/secret@host",
            "redis-sentinel://joe:1/secret@host/mymaster",
            "redis-sentinel://joe:1/secret@host",
            "redis-sentinel://joe:1?secret=2@host/mymaster",
            "redis://joe:x/secret@host",
            "redis://joe:x?secret@host",
            "redis://joe:x#secret@host",
            "redis-cluster://joe:x#secret@host",
        ] {
            let problem = problem(url);
            assert!(!problem.contains("secret"), "{url}: {problem}");
            assert!(
                problem.contains("write %2F for /, %3F for ? and %23 for #"),
                "{url}: {problem}"
            );
        }
        let url = "redis-sentinel://one/mymaster?sentinel_password=p@ss";
        assert!(Deployment::parse(url).is_ok());
    }

    #[test]
    fn a_server_has_a_host_or_a_path_and_credentials() {
        let tcp = |host: &str, port, tls| Endpoint::Tcp { host: host.to_owned(), port, tls };
        for (url, endpoint, expected) in [
            ("redis://host", tcp("host", 6379, false), (None, None)),
            ("valkey://joe@10.0.0.1:1", tcp("10.0.0.1", 1, false), (Some("joe"), None)),
            ("rediss://:p%40ss@[::1]", tcp("::1", 6379, true), (None, Some("p@ss"))),
            ("valkeys://j%C3%B6:a:b@host/", tcp("host", 6379, true), (Some("jö"), Some("a:b"))),
            ("redis://:a@b@host", tcp("host", 6379, false), (None, Some("a@b"))),
            ("redis://joe:@host", tcp("host", 6379, false), (Some("joe"), None)),
            ("redis://:a%zz+%25@host", tcp("host", 6379, false), (None, Some("a%zz+%"))),
            (
                "unix:///tmp/a%20b.sock?user=joe&pass=a+b%2Bc",
                Endpoint::Unix("/tmp/a b.sock".into()),
                (Some("joe"), Some("a b+c")),
            ),
            ("redis+unix:///s", Endpoint::Unix("/s".into()), (None, None)),
        ] {
            let server = server(url);
            assert_eq!(server.endpoint, endpoint, "{url}");
            assert_eq!(credentials(&server), expected, "{url}");
            assert!(!format!("{server:?}").contains("a@b"), "{server:?}");
        }
        for url in [
            "redis://ho st",
            "redis://0.0.0.0",
            "redis://[::]:1",
            "redis://[::g]",
            "redis://::1",
            "redis://:%ff@host",
            "unix://host/path",
            "unix://",
            "http://host",
        ] {
            assert!(problem(url).contains("it does not parse"), "{url}: {}", problem(url));
        }
    }
}
