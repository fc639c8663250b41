import type { COMPLETE_ARGUMENT, Shell } from './complete.ts';

const COMPLETE = '__complete' satisfies typeof COMPLETE_ARGUMENT;

/*
 * Each script does as little as its shell allows: it passes the words on as they were typed, never evaluated, and
 * offers the lines that come back. complete.ts decides what they are.
 */

/** Works without the bash-completion package, and with it. */
const BASH = `\
# bash completion for davit; made by: davit completion bash
_davit() {
    local program=\${COMP_WORDS[0]/#\\~\\//$HOME/} paths='' line='' glued='' index
    local -a words=()
    COMPREPLY=()
    type -P -- "$program" >/dev/null || program=davit
    # Bash breaks words at : and =, which davit has within words: they are joined again.
    for ((index = 1; index <= COMP_CWORD; index++)); do
        line=\${COMP_WORDS[index]}
        if [[ -n $line && \${#words[@]} -gt 0 && ( -n $glued || $line =~ ^[:=]+$ ) ]]; then
            words[\${#words[@]}-1]+=$line
        else
            words+=("$line")
        fi
        glued=
        [[ $line =~ ^[:=]+$ ]] && glued=yes
    done
    {
        read -r paths
        while IFS= read -r line; do COMPREPLY+=("$line"); done
    } < <("$program" ${COMPLETE} bash "\${words[@]}" 2>/dev/null)
    # Bash replaces only what follows the last of these breaks.
    line=\${words[\${#words[@]}-1]}
    if [[ $line != [\\'\\"]* && $COMP_WORDBREAKS == *:* && $line == *:* ]]; then
        COMPREPLY=("\${COMPREPLY[@]#"\${line%"\${line##*:}"}"}")
    elif [[ $line != [\\'\\"]* && $COMP_WORDBREAKS == *=* && $line == *=* ]]; then
        COMPREPLY=("\${COMPREPLY[@]#"\${line%"\${line##*=}"}"}")
    fi
    compopt -o nosort 2>/dev/null
    case $paths in
        files) compopt -o default 2>/dev/null ;;
        directories) compopt +o default -o dirnames 2>/dev/null ;;
        *) compopt +o default 2>/dev/null ;;
    esac
    return 0
}
complete -o default -F _davit davit
`;

const ZSH = `\
#compdef davit
# zsh completion for davit; made by: davit completion zsh
_davit() {
    local program=\${(Q)words[1]/#\\~\\//$HOME/} paths='' value='' description=''
    local -a given=() values=() shown=()
    local -i index=2 width=0
    whence -p -- "$program" >/dev/null || program=davit
    for ((; index < CURRENT; index++)); do given+=("\${(Q)words[index]}"); done
    given+=("\${(Q)PREFIX}")
    {
        IFS= read -r paths
        while IFS=$'\\t' read -r value description; do
            values+=("$value")
            shown+=("$description")
            ((\${#value} > width)) && width=\${#value}
        done
    } < <("$program" ${COMPLETE} zsh "\${given[@]}" 2>/dev/null)
    for ((index = 1; index <= \${#values}; index++)); do
        [[ -n $shown[index] ]] && shown[index]="\${(r:width:)values[index]}  -- $shown[index]"
        [[ -n $shown[index] ]] || shown[index]=$values[index]
        shown[index]=\${shown[index][1,COLUMNS-1]}
    done
    case $paths in
        files) [[ $PREFIX == --*=* ]] && compset -P '*='; _files ;;
        directories) [[ $PREFIX == --*=* ]] && compset -P '*='; _files -/ ;;
        *) compadd -l -V davit -d shown -a values ;;
    esac
}
if [[ \${funcstack[1]} == _davit ]]; then
    _davit "$@"
else
    compdef _davit davit
fi
`;

const FISH = `\
# fish completion for davit; made by: davit completion fish
function __davit_complete
    set -l words (commandline -opc)
    set -l typed (commandline -ct)
    # Without its quotes, even if one is still open.
    set -l current (string unescape -- "$typed"; or string unescape -- "$typed'"; or string unescape -- "$typed\\"")
    # The program itself, not an alias of that name: sudo in one would ask for a password at each tab.
    set -l program (command -s -- $words[1]; or command -s davit; or echo davit)
    set -l lines ($program ${COMPLETE} fish $words[2..-1] "$current" 2>/dev/null)
    set -l option (string match -r -- '^--[^=]+=' "$current")
    set -l value (string replace -r -- '^--[^=]+=' '' "$current")
    # Fish's own functions do not expand ~, and a candidate must begin with what was typed.
    set -l home
    set -l tilde
    if string match -q -- '~/*' "$value"
        set home $HOME
        set tilde '~'
        set value (string replace -- '~' "$HOME" "$value")
    end
    set -l paths
    switch "$lines[1]"
        case files
            set paths (__fish_complete_path "$value")
        case directories
            set paths (__fish_complete_directories "$value")
        case '*'
            for line in $lines[2..-1]
                printf '%s\\n' "$line"
            end
    end
    for path in $paths
        printf '%s%s\\n' "$option" (string replace -- "$home" "$tilde" "$path")
    end
end
complete -c davit -e
complete -c davit -k -f -a '(__davit_complete)'
`;

/** What `davit completion` prints for each shell. */
export const SCRIPTS: Record<Shell, string> = { bash: BASH, zsh: ZSH, fish: FISH };
