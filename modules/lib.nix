# Small pure functions that the modules share. No pkgs, no config.
{ lib }:
let
  # A JSON string is a YAML double-quoted scalar, so nothing needs to be escaped twice.
  scalar =
    value:
    if lib.isString value then
      builtins.toJSON value
    else if lib.isBool value || lib.isInt value || lib.isFloat value || value == null then
      builtins.toJSON value
    else
      throw "cannot write a ${builtins.typeOf value} as YAML";

  isEmpty = value: value == { } || value == [ ];

  block =
    indent: value:
    if lib.isAttrs value then
      lib.concatStrings (lib.mapAttrsToList (name: entry indent (key name)) value)
    else
      lib.concatMapStrings (item indent) value;

  # Keys that YAML would read as something else than a string are quoted.
  key = name: if builtins.match "[A-Za-z_][A-Za-z0-9_.-]*" name != null then name else scalar name;

  entry =
    indent: name: value:
    if lib.isAttrs value || lib.isList value then
      if isEmpty value then
        "${indent}${name}: ${if lib.isAttrs value then "{}" else "[]"}\n"
      else
        "${indent}${name}:\n${block "${indent}  " value}"
    else
      "${indent}${name}: ${scalar value}\n";

  item =
    indent: value:
    if (lib.isAttrs value || lib.isList value) && !(isEmpty value) then
      # The first line of the nested block takes the dash in place of its indentation.
      "${indent}- ${lib.removePrefix "${indent}  " (block "${indent}  " value)}"
    else if isEmpty value then
      "${indent}- ${if lib.isAttrs value then "{}" else "[]"}\n"
    else
      "${indent}- ${scalar value}\n";
in
rec {
  # Readable YAML: two spaces, one value a line. Attribute names come out sorted.
  toYAML = value: if isEmpty value then "${scalar null}\n" else block "" value;

  # Drops nulls, at every depth: an option that was not set is not written.
  dropNulls =
    value:
    if lib.isAttrs value then
      lib.mapAttrs (_: dropNulls) (lib.filterAttrs (_: v: v != null) value)
    else if lib.isList value then
      map dropNulls value
    else
      value;

  # Why a file with a secret in it cannot be at this place; null when it can.
  secretPathFault =
    value:
    let
      text = toString value;
    in
    if builtins.isPath value then
      "is a Nix path literal, which copies the file into the world-readable Nix store; write it as a string, such as \"/var/lib/secrets/NAME\""
    else if lib.hasPrefix builtins.storeDir text then
      "is inside the Nix store, which every user of the machine can read; keep the file outside of it, such as in /var/lib/secrets"
    else if !(lib.hasPrefix "/" text) then
      "is not an absolute path"
    else
      null;

  isPrivateKey = text: lib.hasInfix "PRIVATE KEY" text;

  # The one-line form of an OpenSSH public key, without options before it.
  isPublicKey =
    text:
    builtins.match "(ssh-(ed25519|rsa)|ecdsa-sha2-nistp(256|384|521)|sk-(ssh-ed25519|ecdsa-sha2-nistp256)@openssh\\.com) [A-Za-z0-9+/]+=*( [^\n]*)?" text
    != null;

  # A name that becomes part of ids, volume names and file names.
  isPlainName = text: builtins.match "[A-Za-z0-9][A-Za-z0-9._-]*" text != null;

  # The UUID of something that is only known by its name: the same on every evaluation. Version 8 of
  # RFC 9562 ("custom"), because it is a SHA-256 digest cut short.
  uuidOf =
    name:
    let
      hex = builtins.hashString "sha256" name;
      part = start: len: lib.substring start len hex;
    in
    "${part 0 8}-${part 8 4}-8${part 13 3}-a${part 17 3}-${part 20 12}";

  # The port of ADDR:PORT, [ADDR]:PORT or :PORT; null for unix:PATH and whatever else has none.
  portOf =
    address:
    let
      found = builtins.match ".*:([0-9]+)" address;
    in
    if lib.hasPrefix "unix:" address || found == null then null else lib.toInt (lib.head found);

  isLoopback =
    address:
    lib.hasPrefix "unix:" address
    || lib.hasPrefix "127." address
    || lib.hasPrefix "[::1]:" address
    || lib.hasPrefix "localhost:" address;

  # The [Service] settings of a unit file as serviceConfig: repeated keys become lists, and an empty
  # value (which resets a list for systemd) starts it anew.
  readServiceSection =
    text:
    let
      step =
        state: line:
        let
          section = builtins.match "\\[([A-Za-z]+)]" line;
          setting = builtins.match "([A-Za-z]+)=(.*)" line;
          name = lib.elemAt setting 0;
          value = lib.elemAt setting 1;
        in
        if section != null then
          state // { section = lib.head section; }
        else if setting == null || state.section != "Service" then
          state
        else
          state
          // {
            values = state.values // {
              ${name} = if value == "" then [ ] else (state.values.${name} or [ ]) ++ [ value ];
            };
          };
      joined = lib.replaceStrings [ "\\\n" ] [ " " ] text;
      read = lib.foldl' step {
        section = "";
        values = { };
      } (lib.splitString "\n" joined);
    in
    lib.mapAttrs (_: values: if lib.length values == 1 then lib.head values else values) read.values;
}
