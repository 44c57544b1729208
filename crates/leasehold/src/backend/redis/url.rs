//! Parses the URLs of Redis deployments.
//!
//! The Redis library ignores parameters that it does not know, and `db` everywhere but on a Unix socket. A typing error
//! would then lead to another database without notice, so we check the parts of a URL before the library parses it. No
//! error repeats a part of the URL that may belong to a password.

use redis::{ConnectionInfo, IntoConnectionInfo};

use super::deployment::SentinelSettings;
use crate::Error;

const CLUSTER: &str = "redis-cluster";
const SENTINEL: &str = "redis-sentinel";

/// Parses the URL of one server.
pub(super) fn server(url: &str) -> Result<ConnectionInfo, Error> {
    const EXPECTED: &str = "expected redis://[user[:password]@]host[:port][/database], rediss://… for TLS, or unix:///path";
    let invalid = |problem: String| Error::invalid("url", format!("{problem}: {EXPECTED}"));
    let Some((scheme, rest)) = url.split_once("://") else {
        return Err(invalid("// is missing before the host".to_owned()));
    };
    let parts = Parts::of(rest, 6379);
    let is_socket = scheme.ends_with("unix");
    let problem = if is_socket {
        parts.parameter_problem(&["db", "user", "pass", "protocol"])
    } else {
        parts.problem(&["db", "protocol"]).or_else(|| parts.host_problem())
    };
    if let Some(problem) = problem {
        return Err(invalid(problem));
    }
    if parts
        .fragment
        .is_some_and(|own| own != "insecure" || !matches!(scheme, "rediss" | "valkeys"))
    {
        return Err(invalid("only #insecure may follow the URL, and only over TLS".to_owned()));
    }
    if parts.hosts.len() > 1 {
        let problem = "it has several hosts; a single server has one";
        return Err(invalid(format!("{problem}; use {CLUSTER}:// or {SENTINEL}://")));
    }
    let in_path = Some(parts.path).filter(|path| !is_socket && !path.is_empty());
    let database = match (in_path, parts.parameter("db")) {
        (Some(path), Some(parameter)) if path != parameter => {
            let problem = "the path and the parameter db select different databases";
            return Err(invalid(problem.to_owned()));
        }
        (path, parameter) => path.or(parameter).map(database).transpose().map_err(invalid)?,
    };
    let info = parse(url, EXPECTED)?;
    let Some(database) = database else { return Ok(info) };
    let redis = info.redis_settings().clone().set_db(database);
    Ok(info.set_redis_settings(redis))
}

fn database(text: &str) -> Result<i64, String> {
    match text.parse::<i64>() {
        Ok(database @ ..0) => Err(format!("there is no database {database}; the first is 0")),
        Ok(database) => Ok(database),
        // It is not repeated: it may be part of a password that contains a slash.
        Err(_) => Err("the database is not a number".to_owned()),
    }
}

fn parse(url: &str, expected: &str) -> Result<ConnectionInfo, Error> {
    let invalid = |_| Error::invalid("url", format!("it does not parse: {expected}"));
    url.into_connection_info().map_err(invalid)
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
            rest.split_once('#').map_or((rest, None), |(rest, own)| (rest, Some(own)));
        let (rest, parameters) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (credentials, hosts) = authority.rsplit_once('@').unwrap_or(("", authority));
        let has_port =
            |host: &str| host.rsplit_once(']').map_or(host, |(_, rest)| rest).contains(':');
        let host = |host: &str| {
            if has_port(host) { host.to_owned() } else { format!("{host}:{port}") }
        };
        let parameters = parameters.split('&').filter(|own| !own.is_empty());
        Self {
            credentials,
            hosts: hosts.split(',').filter(|host| !host.is_empty()).map(host).collect(),
            path: path.trim_end_matches('/'),
            parameters: parameters.map(|own| own.split_once('=').unwrap_or((own, ""))).collect(),
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
        let count = |name: &str| self.parameters.iter().filter(|(own, _)| *own == name).count();
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
        self.parameters.iter().find(|(own, _)| *own == name).map(|(_, value)| *value)
    }
}

fn late_at() -> String {
    let problem = "there is an @ after the hosts";
    format!("{problem}; in a password, write %2F for /, %3F for ? and %23 for #")
}

/// Parses what follows `redis-cluster://`.
pub(super) fn cluster(scheme: &str, rest: &str) -> Result<Vec<ConnectionInfo>, Error> {
    let expected = format!("expected {CLUSTER}://[user[:password]@]host[:port][,host[:port]…]");
    let parts = Parts::of(rest, 6379);
    let invalid = |problem: String| Error::invalid("url", format!("{problem}: {expected}"));
    if let Some(problem) = parts.problem(&[]).or_else(|| parts.unused_fragment()) {
        return Err(invalid(problem));
    }
    if !matches!(parts.path, "" | "0") {
        return Err(invalid("it selects a database; a cluster has only database 0".to_owned()));
    }
    if let Some(problem) = parts.host_problem() {
        return Err(invalid(problem));
    }
    let node =
        |host: &String| parse(&format!("{scheme}://{}@{host}", parts.credentials), &expected);
    parts.hosts.iter().map(node).collect()
}

/// Parses what follows `redis-sentinel://`.
pub(super) fn sentinel(scheme: &str, rest: &str) -> Result<SentinelSettings, Error> {
    const PARAMETERS: [&str; 3] = ["sentinel_user", "sentinel_password", "sentinel_tls"];
    let expected = format!(
        "expected {SENTINEL}://[user[:password]@]host[:port][,host[:port]…]/name of the primary[/database], with the \
         parameters sentinel_user, sentinel_password and sentinel_tls (yes or no), if the sentinels need them"
    );
    let invalid = |problem: String| Error::invalid("url", format!("{problem}: {expected}"));
    let parts = Parts::of(rest, 26379);
    if let Some(problem) = parts.problem(&PARAMETERS).or_else(|| parts.unused_fragment()) {
        return Err(invalid(problem));
    }
    let (service, database) = parts.path.split_once('/').unwrap_or((parts.path, "0"));
    if service.is_empty() {
        return Err(invalid("the name of the primary is missing".to_owned()));
    }
    if database.parse::<u32>().is_err() {
        return Err(invalid("the database is not a number".to_owned()));
    }
    if let Some(problem) = parts.host_problem() {
        return Err(invalid(problem));
    }
    let first = &parts.hosts[0];
    let server = parse(&format!("{scheme}://{}@{first}/{database}", parts.credentials), &expected)?;
    let scheme = match parts.parameter("sentinel_tls") {
        None => scheme,
        Some("yes") => "rediss",
        Some("no") => "redis",
        Some(other) => {
            return Err(invalid(format!("sentinel_tls is {other:?}; it must be yes or no")));
        }
    };
    let user = parts.parameter("sentinel_user").unwrap_or_default();
    let password = parts.parameter("sentinel_password").map(|own| format!(":{own}"));
    let credentials = format!("{user}{}", password.unwrap_or_default());
    let sentinel = |host: &String| parse(&format!("{scheme}://{credentials}@{host}"), &expected);
    let sentinels = parts.hosts.iter().map(sentinel).collect::<Result<_, _>>()?;
    Ok(SentinelSettings { sentinels, service: service.to_owned(), server })
}

#[cfg(test)]
mod tests {
    use redis::ConnectionAddr;

    use super::super::deployment::{Deployment, host_and_port, is_tls};

    fn problem(url: &str) -> String {
        let Err(error) = Deployment::parse(url) else { panic!("{url} parses") };
        error.to_string()
    }

    #[test]
    fn sentinels_and_servers_have_credentials_of_their_own() {
        let url = "rediss-sentinel://app:s%40cret@one:1,two,[::1]:3/mymaster/2?sentinel_user=watch&sentinel_password=p%26w&sentinel_tls=no";
        let parsed = Deployment::parse(url).unwrap();
        assert_eq!(parsed.address(), "rediss-sentinel://one:1,two:26379,[::1]:3/mymaster/2");
        let Deployment::Sentinel(own) = parsed else { panic!("no sentinels") };
        let redis = own.server.redis_settings();
        assert_eq!((redis.username(), redis.password()), (Some("app"), Some("s@cret")));
        assert_eq!(redis.db(), 2);
        assert!(is_tls(&own.server));
        let redis = own.sentinels[1].redis_settings();
        assert_eq!((redis.username(), redis.password()), (Some("watch"), Some("p&w")));
        assert_eq!(host_and_port(&own.sentinels[2]), ("::1".to_owned(), 3));
        assert!(!is_tls(&own.sentinels[0]));
    }

    #[test]
    fn a_cluster_is_reached_by_some_of_its_nodes() {
        let parsed = Deployment::parse("redis-cluster://:pw@one,two:7000").unwrap();
        assert_eq!(parsed.address(), "redis-cluster://one:6379,two:7000");
        let Deployment::Cluster(nodes) = parsed else { panic!("no cluster") };
        assert_eq!(nodes[1].redis_settings().password(), Some("pw"));
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
        let database = |url: &str| {
            let Ok(Deployment::Server(info)) = Deployment::parse(url) else { panic!("{url}") };
            info.redis_settings().db()
        };
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
    fn what_the_library_would_ignore_is_refused() {
        assert!(problem("redis://host?timeout=5").contains("the parameter \"timeout\" is unknown"));
        assert!(problem("unix:///a?password=x").contains("the parameter \"password\" is unknown"));
        assert!(problem("redis://host#insecure").contains("only #insecure may follow"));
        assert!(problem("rediss://host#secure").contains("only #insecure may follow"));
        assert!(problem("redis-cluster://host#insecure").contains("it must not contain #"));
        assert!(problem("redis://one,two").contains("use redis-cluster:// or redis-sentinel://"));
        let Ok(Deployment::Server(info)) = Deployment::parse("rediss://host#insecure") else {
            panic!("#insecure is known")
        };
        assert!(matches!(info.addr(), ConnectionAddr::TcpTls { insecure: true, .. }));
    }

    #[test]
    fn an_invalid_port_is_named() {
        for url in [
            "redis://a:99999",
            "rediss://u:p@[::1]:99999",
            "redis-cluster://a,b:99999",
            "redis-sentinel://a:99999/m",
        ] {
            let said = problem(url);
            assert!(
                said.contains("the port 99999 is not a number from 1 to 65535"),
                "{url}: {said}"
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
            let said = problem(url);
            assert!(!said.contains("secret"), "{url}: {said}");
            assert!(said.contains("write %2F for /, %3F for ? and %23 for #"), "{url}: {said}");
        }
        let url = "redis-sentinel://one/mymaster?sentinel_password=p@ss";
        assert!(Deployment::parse(url).is_ok());
    }
}
